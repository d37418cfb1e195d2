"""The generator: a vLLM engine that answers one prompt at a time and keeps its weights fresh."""
