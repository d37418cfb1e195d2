"""The audit of a run: everything that can be counted, computed or compared again, from its Redis and its folder."""
