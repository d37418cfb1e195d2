"""Demonstrations: made of right answers, read from rows, rendered into a run folder."""
