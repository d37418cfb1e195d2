"""Starts vLLM, and offers it to episodes as the policy."""
