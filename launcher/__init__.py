"""The `spo` command: starts a whole run on one machine and shows runs. It may import every other package."""
