"""`spo sft`: supervised training on demonstrations, from rows to a model."""
