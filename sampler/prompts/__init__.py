"""The prompts of a run, read from its data."""
