"""The panels of the page: what of a run is shown together, and what stands where there is none."""
