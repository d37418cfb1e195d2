"""The generator: answers prompts with a vLLM engine, into which it loads each new version of the weights."""
