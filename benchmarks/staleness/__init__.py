"""Does off-policy correction keep learning stable when samples are stale? `python -m benchmarks.staleness`.

Trains the tiny arithmetic model with samples that are exactly 0, 4 and 16 weight versions old, once for each way of
correcting and each seed, and compares the accuracies. A job takes about a minute of one core.
"""
