"""Teachers, which score the tokens of a finished episode before its result is sent (docs/teacher.md)."""
