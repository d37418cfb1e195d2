"""Reads a run folder, while the run goes on and when it is over."""
