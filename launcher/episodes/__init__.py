"""`spo episodes`: lists and shows the episodes that a run has kept."""
