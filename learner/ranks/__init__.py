"""The learner's ranks: how they start, how they find each other, and the collectives they share."""
