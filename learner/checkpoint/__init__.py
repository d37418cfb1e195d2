"""Checkpoints and exports: writing, reading and verifying them."""
