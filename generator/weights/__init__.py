"""Weights of the learner: how they arrive, and how vLLM loads them."""
