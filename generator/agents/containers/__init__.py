"""Agents in containers of their tasks: a client of the engine's API, the life of a container, and its grading."""
