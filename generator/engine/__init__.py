"""vLLM: how it is started, and the policy as episodes see it."""
