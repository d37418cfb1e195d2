"""What weights cost as deltas from the version before, and whether they arrive whatever is killed."""
