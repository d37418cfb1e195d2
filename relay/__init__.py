"""The relay: pulls the weights once and serves them to its neighbours. Needs no torch."""
