"""`spo eval`: evaluates a model on held-out prompts without training it."""
