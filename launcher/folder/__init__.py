"""Reads run folders, during a run and afterwards."""
