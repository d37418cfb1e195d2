"""The learner's processes: how they start, find each other, and what they do together."""
