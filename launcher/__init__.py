"""The `spo` command: a whole run on one machine, and ways to look at it. Knows all the others."""
