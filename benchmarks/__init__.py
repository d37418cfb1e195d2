"""Measurements, each as a ratio within one run, and the tables of docs/studies.md."""
