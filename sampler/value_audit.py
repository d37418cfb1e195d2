"""An audit of the values: the variance that the baseline saves, and how well values agree with rewards."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from sampler.files.metrics_file import Histogram
from sampler.tracker import ValueTracker

WINDOW = 64  # batches
BINS = 10
FEWEST = 4  # batches needed for an interval of the variance ratio
POOL_PART = 16  # figures over all N prompts are recomputed after N / POOL_PART rewards


class ValueAudit:
    """Compares each reward with its prompt's value before it; figures cover the last `WINDOW` batches."""

    def __init__(self, tracker: ValueTracker) -> None:
        self._tracker = tracker
        self._pairs: list[tuple[float, float]] = []  # value and reward in [0, 1] of each sample since the last batch
        self._squares: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._bins: deque[np.ndarray] = deque(maxlen=WINDOW)
        self._of_pool: dict[str, float] = {}
        self._until_pool = 0  # rewards until the figures of all prompts are computed again

    def add(self, value: float, reward: float) -> None:
        """Add a counted reward in [0, 1] and its prompt's value before it."""
        self._pairs.append((value, reward))
        self._until_pool -= 1

    def variance_ratio(self) -> float | None:
        """Var(r - v) / Var(r), each about the mean of its batch; above 1 the baseline hurts. None if not known yet."""
        advantage, reward = map(sum, zip(*self._squares, strict=True)) if self._squares else (0.0, 0.0)
        return advantage / reward if reward else None

    def of_batch(self) -> dict[str, float]:
        self._end_batch()
        values: dict[str, float] = {}
        ratio = self.variance_ratio()
        if ratio is not None:
            values["tracker/variance_ratio"] = ratio
            if len(self._squares) >= FEWEST:
                error = 2 * self._standard_error()
                values["tracker/variance_ratio_low"] = ratio - error
                values["tracker/variance_ratio_high"] = ratio + error
        if self._bins:
            values |= _reliability(np.sum(self._bins, axis=0))
        tracker = self._tracker
        if tracker.population is not None:
            mean, k = tracker.population.chosen
            values["tracker/k"] = k
            values |= {f"tracker/mean_is_{name}": float(name == mean) for name in tracker.population.means}
        return values | self._of_pool

    def of_pool(self) -> dict[str, Histogram]:
        """Count prompts by value, in percent, and by number of visits; {} if little has changed."""
        if self._until_pool > 0:
            return {}
        tracker = self._tracker
        self._until_pool = len(tracker.prompt_ids) // POOL_PART
        visited = tracker.visits > 0
        if visited.any():
            self._of_pool = {
                "tracker/visited": float(visited.mean()),
                "tracker/always_solved": float((tracker.beta == tracker.prior)[visited].mean()),
                "tracker/never_solved": float((tracker.alpha == tracker.prior)[visited].mean()),
            }
        return {
            "tracker/value_percent": Histogram.of_integers(np.rint(100 * tracker.values()).astype(np.int64)),
            "tracker/visits": Histogram.of_integers(tracker.visits),
        }

    def _end_batch(self) -> None:
        if len(self._pairs) < 2:
            return
        values, rewards = np.array(self._pairs).T
        self._pairs.clear()
        self._squares.append((squares(rewards - values), squares(rewards)))
        bins = np.minimum((values * BINS).astype(np.int64), BINS - 1)
        table = np.zeros((BINS, 3))
        np.add.at(table, bins, np.stack([values, rewards, np.ones_like(values)], 1))
        self._bins.append(table)

    def _standard_error(self) -> float:
        """The variance ratio's standard error, by leaving out one batch after the other (jackknife)."""
        squares = np.array(self._squares)
        others = squares.sum(0) - squares
        ratios = others[:, 0] / np.maximum(others[:, 1], 1e-12)
        n = len(ratios)
        return math.sqrt((n - 1) / n * float(((ratios - ratios.mean()) ** 2).sum()))


def squares(values: np.ndarray) -> float:
    """Sum of the squared deviations from the mean."""
    return float(((values - values.mean()) ** 2).sum())


def _reliability(bins: np.ndarray) -> dict[str, float]:
    """Mean reward of the samples whose value lies in each tenth, and the mean gap between value and reward.

    Args:
        bins: sum of values, sum of rewards and number of samples of each tenth, [10, 3].
    """
    filled = bins[:, 2] > 0
    number = bins[filled, 2]
    gaps = np.abs(bins[filled, 1] - bins[filled, 0])
    values = {"tracker/calibration_error": float(gaps.sum() / number.sum())}
    for i in np.flatnonzero(filled).tolist():
        values[f"tracker/reward_where_value_is_0.{i}"] = float(bins[i, 1] / bins[i, 2])
    return values
