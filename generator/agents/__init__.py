"""Agents: programs of a user that play episodes and ask the policy over HTTP."""
