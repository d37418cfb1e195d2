"""Supervised training: the learner's own step on demonstrations."""
