"""Weights on their way from the learner to the generators: format, serving, pulling. Imports no torch."""
