"""Text and tokens: the chat template, the tokenizer, and the transcript of an episode."""
