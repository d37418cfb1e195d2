"""Conversations as token ids: the chat template, its tokens, and the formats of tool calls."""
