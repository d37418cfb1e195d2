"""`spo values`: estimates the values from which the tracker starts, before a run."""
