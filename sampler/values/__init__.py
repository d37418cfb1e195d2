"""The values of prompts: how they are tracked, what they start from, and how they choose the next prompts."""
