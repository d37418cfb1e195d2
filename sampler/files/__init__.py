"""What the sampler writes into the run folder."""
