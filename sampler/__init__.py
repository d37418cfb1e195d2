"""The sampler: prompts, value tracker, selection, admission, advantages, batches. Never sees a token."""
