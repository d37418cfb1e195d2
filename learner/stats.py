"""Statistics of a batch. Each is declared once, where it is measured, and adds up over micro-batches and ranks.

Nothing here waits for the device before `reduce`, which is called once an optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from common.config import AGE_BUCKETS
from learner.world import World


@dataclass(frozen=True, slots=True)
class Statistic:
    """The sums (or the extreme) behind one metric.

    Attributes:
        kind: a key of `VALUES`.
        sums: float64; of values and perhaps of their squares, and the number of values: [K], or [A, K] by age bucket.
            An extreme is a scalar, a minimum being kept as the maximum of the negative values.
        over: name of the total that the sums are divided by; None: the number of values.
        around: subtracted from the values before they were summed, so that a tiny spread survives the subtraction.
    """

    kind: str
    sums: torch.Tensor
    over: str | None = None
    around: float = 0.0


class Stats:
    """Named statistics. Which names there are depends on the configuration alone, never on the data.

    A name with a slash is a metric; one without is a total that others are divided by. Where the name holds `{age}`,
    `by` gives the age bucket of each value, and there is one metric for every bucket that has values.
    """

    def __init__(self) -> None:
        self._statistics: dict[str, Statistic] = {}

    def total(self, name: str, values: torch.Tensor | float) -> None:
        """The sum of the values."""
        self._add(name, Statistic("total", _sums(torch.as_tensor(values))))

    def mean(
        self,
        name: str,
        values: torch.Tensor | float,
        over: str | None = None,
        around: float = 0.0,
        by: torch.Tensor | None = None,
    ) -> None:
        """The sum of the values, divided by the total `over` or by their number; 0 where that is 0."""
        values = torch.as_tensor(values)
        self._add(name, Statistic("mean", _sums(values - around if around else values, by=by), over, around))

    def std(self, name: str, values: torch.Tensor, over: str, around: float = 0.0, sample: bool = False) -> None:
        """Standard deviation of the values; `sample` divides by one less than their number."""
        centred = values - around
        self._add(name, Statistic("sample_std" if sample else "std", _sums(centred, centred.square()), over))

    def effective_sample_size(
        self, name: str, weights: torch.Tensor, over: str | None = None, by: torch.Tensor | None = None
    ) -> None:
        """(sum w)^2 / (n sum w^2) of the weights, between 0 and 1."""
        self._add(name, Statistic("effective_sample_size", _sums(weights, weights.square(), by=by), over))

    def max(self, name: str, values: torch.Tensor) -> None:
        """The largest value; left out where there is none."""
        self._add(name, Statistic("max", _largest(values)))

    def min(self, name: str, values: torch.Tensor) -> None:
        """The smallest value; left out where there is none."""
        self._add(name, Statistic("min", _largest(-values)))

    def update(self, other: Stats) -> None:
        """Take in the statistics of other micro-batches."""
        for name, statistic in other._statistics.items():
            self._add(name, statistic)

    def reduce(self, world: World | None = None, names: Iterable[str] | None = None) -> dict[str, float]:
        """Values over all ranks: of every metric, or of `names` alone. All ranks must ask for the same.

        What is not finite is left out.
        """
        chosen = {name: self._statistics[name] for name in (self._statistics if names is None else names)}
        totals = {one.over: self._statistics[one.over] for one in chosen.values() if one.over}
        reduced = _all_reduce(chosen | totals, world)
        values: dict[str, float] = {}
        for name, statistic in chosen.items():
            if names is None and "/" not in name:
                continue
            value = VALUES[statistic.kind]
            for label, sums in _labelled(name, reduced[name]):
                count = reduced[statistic.over][0][0] if statistic.over else sums[-1]
                values[label] = value(sums, count, statistic.around)
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def _add(self, name: str, statistic: Statistic) -> None:
        known = self._statistics.get(name)
        if known is not None:
            combine = torch.maximum if statistic.kind in ("max", "min") else torch.add
            statistic = replace(statistic, sums=combine(known.sums, statistic.sums))
        self._statistics[name] = statistic


def _sums(*columns: torch.Tensor, by: torch.Tensor | None = None) -> torch.Tensor:
    """Sums of columns, and their number of values: float64 [K]; by age bucket [A, K]."""
    if by is None:
        count = columns[0].new_tensor(float(columns[0].numel()), dtype=torch.float64)
        return torch.stack([*(values.sum(dtype=torch.float64) for values in columns), count])
    table = torch.stack([*(values.double() for values in columns), torch.ones_like(by, dtype=torch.float64)], 1)
    return table.new_zeros(len(AGE_BUCKETS), table.shape[1]).index_add(0, by, table)


def _largest(values: torch.Tensor) -> torch.Tensor:
    """The largest value, float64 []; minus infinity where there is none."""
    return values.amax().double() if values.numel() else values.new_tensor(-torch.inf, dtype=torch.float64)


def _all_reduce(statistics: dict[str, Statistic], world: World | None) -> dict[str, list[list[float]]]:
    """The sums of each statistic over all ranks as plain numbers, one list for each age bucket or one in all."""
    extremes = {name: one.sums for name, one in statistics.items() if one.kind in ("max", "min")}
    added = {name: one.sums for name, one in statistics.items() if name not in extremes}
    tops = torch.stack([*extremes.values()]).tolist() if extremes else []
    flat = torch.cat([sums.reshape(-1) for sums in added.values()]).tolist() if added else []
    if world is not None:
        flat, tops = world.all_reduce_sum(flat), world.all_reduce_max(tops)
    reduced = {name: [[top]] for name, top in zip(extremes, tops, strict=True)}
    start = 0
    for name, sums in added.items():
        width = sums.shape[-1]
        end = start + sums.numel()
        reduced[name] = [flat[at : at + width] for at in range(start, end, width)]
        start = end
    return reduced


def _labelled(name: str, reduced: list[list[float]]) -> list[tuple[str, list[float]]]:
    """Each metric's name with its sums: one, or one for every age bucket that has values."""
    if "{age}" not in name:
        return [(name, reduced[0])]
    return [(name.format(age=age), sums) for age, sums in zip(AGE_BUCKETS, reduced, strict=True) if sums[-1]]


def _mean(sums: list[float], count: float, around: float) -> float:
    return around + sums[0] / count if count else 0.0


def _std(sums: list[float], count: float, around: float) -> float:
    return math.sqrt(max(sums[1] / count - (sums[0] / count) ** 2, 0.0)) if count else 0.0


def _sample_std(sums: list[float], count: float, around: float) -> float:
    return math.sqrt(max(sums[1] - count * (sums[0] / count) ** 2, 0.0) / (count - 1)) if count > 1 else 0.0


def _effective_sample_size(sums: list[float], count: float, around: float) -> float:
    return min(1.0, sums[0] ** 2 / (count * sums[1])) if sums[1] > 0 else 0.0


VALUES: dict[str, Callable[[list[float], float, float], float]] = {
    "total": lambda sums, count, around: sums[0],
    "mean": _mean,
    "std": _std,
    "sample_std": _sample_std,
    "effective_sample_size": _effective_sample_size,
    "max": lambda sums, count, around: sums[0],
    "min": lambda sums, count, around: -sums[0],
}
