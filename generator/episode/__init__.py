"""Episodes: how their turns run, the parts they need, and the results that are sent."""
