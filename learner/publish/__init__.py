"""Publishes a version: its weights are copied, served and announced."""
