"""Checkpoints and exports: written, read, and found whole."""
