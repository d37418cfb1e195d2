"""Statistics of runs: bands over prompts, bands over seeds, and the version at which a curve reaches a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from launcher.folder.metrics import Series

RESAMPLES = 10_000
_AT_ONCE = 1 << 22  # resampled values in memory


class Band(NamedTuple):
    """A mean, and the ends of its band."""

    mean: float
    low: float
    high: float


def bootstrap(values: np.ndarray) -> Band:
    """Mean, and the 2.5% and 97.5% quantiles of means over resampled prompts (percentile bootstrap; Efron, 1979).

    Args:
        values: one value per prompt, float64 [N], N > 0. For several responses to a prompt this is their mean, so that
            a prompt is drawn with all of its responses.
    """
    generator = np.random.default_rng(0)
    means = np.empty(RESAMPLES)
    step = max(1, _AT_ONCE // len(values))
    for start in range(0, RESAMPLES, step):
        rows = min(step, RESAMPLES - start)
        means[start : start + rows] = values[generator.integers(len(values), size=(rows, len(values)))].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Band(float(values.mean()), float(low), float(high))


def spread(values: Sequence[float]) -> Band:
    return Band(float(np.mean(values)), float(np.min(values)), float(np.max(values)))


class Curve(NamedTuple):
    """Values over the versions of the weights: `versions` [N] ascending, `values` [N], both float64."""

    versions: np.ndarray
    values: np.ndarray


def finite(series: Series) -> Curve:
    """A series without the versions at which nothing could be measured."""
    is_finite = np.isfinite(series.values)
    return Curve(series.versions[is_finite].astype(float), series.values[is_finite])


def over_runs(curves: Sequence[Curve]) -> tuple[Curve, Curve, Curve]:
    """Mean, lowest and highest over several runs, within the versions that all of them cover.

    There is a point at each version that any of the runs has; the others are interpolated linearly.
    """
    curves = [curve for curve in curves if len(curve.versions)]
    if not curves:
        return (Curve(np.empty(0), np.empty(0)),) * 3
    first = max(curve.versions[0] for curve in curves)
    last = min(curve.versions[-1] for curve in curves)
    versions = np.unique(np.concatenate([curve.versions for curve in curves]))
    versions = versions[(versions >= first) & (versions <= last)]
    values = np.array([np.interp(versions, curve.versions, curve.values) for curve in curves])
    mean, low, high = (Curve(versions, side) for side in (values.mean(0), values.min(0), values.max(0)))
    return mean, low, high


def smoothed(curve: Curve, window: int) -> Curve:
    """The mean at each version over the last `window` values up to it, or over fewer at the beginning."""
    sums = np.cumsum(np.concatenate([[0.0], curve.values]))
    ends = np.arange(1, len(curve.values) + 1)
    starts = np.maximum(0, ends - window)
    return Curve(curve.versions, (sums[ends] - sums[starts]) / (ends - starts))


def first_reaching(curve: Curve, threshold: float) -> int | None:
    """The first version whose value is `threshold` or more; None if there is none."""
    reached = np.flatnonzero(curve.values >= threshold - 1e-9)
    return int(curve.versions[reached[0]]) if len(reached) else None
