"""The panels of the dashboard: what of a run's metrics is shown together, and what stands where there is none."""
