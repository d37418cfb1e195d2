"""Teachers: what scores the tokens of a finished episode, before the episode is handed in (docs/teacher.md)."""
