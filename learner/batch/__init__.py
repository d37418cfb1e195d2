"""A batch as it is trained on: its rows, their outcomes, and the tensors of its micro-batches."""
