"""The policy: its model, what a forward pass computes, and its DeepSpeed engine."""
