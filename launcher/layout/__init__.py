"""Which process of `spo run` gets which GPU of this machine, and why."""
