"""Chooses the source of each task's prompt, by the sources' weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sampler.tracker import ValueTracker

# The fractional part of k times this number is spread evenly however many k there have been (a Kronecker sequence), so
# that each source's share of the tasks so far stays within a few tasks of its weight.
GOLDEN = (math.sqrt(5) - 1) / 2


class Mixture:
    """Draws prompts from several sources in proportion to their weights, and within a source by the tracker's.

    The source of a draw depends on the draw's number alone, not on how many are made at once: a restarted sampler
    draws what the killed one would have drawn. A source without prompts left gives its share to the others.

    Args:
        weights: of the sources, > 0, [S].
        starts: where each source's prompts begin in the tracker, and the end of the last, [S + 1].
    """

    def __init__(self, weights: Sequence[float], starts: Sequence[int]) -> None:
        self._weights = np.array(weights, np.float64)
        self._starts = list(starts)

    def draw(
        self, tracker: ValueTracker, n: int, rng: np.random.Generator, blocked: np.ndarray | None, first: int
    ) -> np.ndarray:
        """Draws `first` to `first + n - 1`, as indices of prompts, int64 [n].

        Args:
            blocked: prompts that are drawn only after all others of their source, bool [N].
        """
        if len(self._weights) == 1:
            return tracker.draw(n, rng, blocked)
        sources = self.sources(first, n, tracker.retired)
        drawn = np.empty(n, np.int64)
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            pool = (self._starts[source], self._starts[source + 1])
            drawn[places] = tracker.draw(len(places), rng, blocked, pool)
        return drawn

    def sources(self, first: int, n: int, retired: np.ndarray) -> np.ndarray:
        """Source of each of n draws, int64 [n]; `retired` marks prompts that are never drawn, bool [N]."""
        bounds = zip(self._starts[:-1], self._starts[1:], strict=True)
        left = np.array([not retired[start:end].all() for start, end in bounds])
        weights = self._weights * left if left.any() else self._weights
        ends = np.cumsum(weights) / weights.sum()
        points = np.arange(first, first + n) * GOLDEN % 1.0
        # Rounding may leave the last end below 1, and the last source may have no weight.
        return np.minimum(np.searchsorted(ends, points, side="right"), np.flatnonzero(weights)[-1])
