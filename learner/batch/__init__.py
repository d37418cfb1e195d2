"""What of a batch is trained on: its rows, their outcomes, and the tensors of its micro-batches."""
