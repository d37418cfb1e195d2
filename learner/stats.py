"""Statistics of a batch. Each is declared once, where it is measured, and adds up over micro-batches and ranks.

Nothing here waits for the device before `reduce`, which is called once an optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from common.config import AGE_BUCKETS
from learner.world import World


class Part(NamedTuple):
    """One of the statistics by age that share a table: its sums begin at a column.

    They are divided by the total `over`, or by the number of values in the age bucket.
    """

    name: str
    kind: str
    start: int
    over: str | None = None


class Statistic(NamedTuple):
    """The sums (or the extreme) behind one metric.

    Attributes:
        kind: a key of `VALUES`.
        sums: float64; of values [], or of values and their squares [2]; by age bucket [A, K + 1], the last column being
            the number of values. A minimum is kept as the maximum of the negative values [].
        over: name of the total that the sums are divided by.
        around: subtracted from the values before they were summed, so that a tiny spread survives the subtraction.
        parts: of statistics by age, what is in which columns.
    """

    kind: str
    sums: torch.Tensor
    over: str | None = None
    around: float = 0.0
    parts: tuple[Part, ...] = ()


class Stats:
    """Named statistics. Which names there are depends on the configuration alone, never on the data.

    A name with a slash is a metric; one without is a total that others are divided by.
    """

    def __init__(self) -> None:
        self._statistics: dict[str, Statistic] = {}

    def total(self, name: str, values: torch.Tensor | float) -> None:
        """The sum of the values."""
        self._add(name, Statistic("total", _sum(torch.as_tensor(values))))

    def mean(self, name: str, values: torch.Tensor | float, over: str, around: float = 0.0) -> None:
        """The sum of the values divided by the total `over`; 0 where that is 0."""
        values = torch.as_tensor(values)
        self._add(name, Statistic("mean", _sum(values - around if around else values), over, around))

    def std(self, name: str, values: torch.Tensor, over: str, around: float = 0.0, sample: bool = False) -> None:
        """Standard deviation of the values; `sample` divides by one less than their number."""
        sums = _sums(values - around if around else values)
        self._add(name, Statistic("sample_std" if sample else "std", sums, over))

    def mean_and_sample_std(self, mean: str, std: str, values: torch.Tensor, over: str, around: float = 0.0) -> None:
        """The mean under one name, and the deviation that divides by one less than the number of values."""
        sums = _sums(values - around if around else values)
        self._add(mean, Statistic("mean", sums[0], over, around))
        self._add(std, Statistic("sample_std", sums, over))

    def effective_sample_size(self, name: str, weights: torch.Tensor, over: str) -> None:
        """(sum w)^2 / (n sum w^2) of the weights, between 0 and 1."""
        self._add(name, Statistic("effective_sample_size", _sums(weights), over))

    def by_age(
        self,
        bucket: torch.Tensor,
        means: dict[str, torch.Tensor],
        effective_sample_sizes: dict[str, torch.Tensor],
        shares: dict[str, str],
    ) -> None:
        """Statistics of each age bucket, whose names hold `{age}`; a bucket without values is left out.

        Args:
            bucket: age bucket of each value, int64 [N].
            means: values [N] by name.
            effective_sample_sizes: weights [N] by name.
            shares: by name, the total that the bucket's number of values is divided by.
        """
        columns = [*means.values()]
        for weights in effective_sample_sizes.values():
            columns += [weights, weights.square()]
        # One pass over the tokens for all of them.
        table = torch.stack([*(values.double() for values in columns), torch.ones_like(bucket).double()], 1)
        sums = table.new_zeros(len(AGE_BUCKETS), table.shape[1]).index_add(0, bucket, table)
        squares = range(len(means), len(columns), 2)
        parts = [Part(name, "mean", number) for number, name in enumerate(means)]
        parts += [
            Part(name, "effective_sample_size", start)
            for name, start in zip(effective_sample_sizes, squares, strict=True)
        ]
        parts += [Part(name, "mean", len(columns), total) for name, total in shares.items()]
        self._add(f"by_age/{parts[0].name}", Statistic("by_age", sums, parts=tuple(parts)))

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
        totals = {over for one in chosen.values() for over in (one.over, *(part.over for part in one.parts)) if over}
        reduced = _all_reduce(chosen | {name: self._statistics[name] for name in totals}, world)
        values: dict[str, float] = {}
        for name, statistic in chosen.items():
            if statistic.kind == "by_age":
                values |= _by_age_values(statistic, reduced, reduced[name])
            elif names is not None or "/" in name:
                count = reduced[statistic.over][0] if statistic.over else 0.0
                values[name] = VALUES[statistic.kind](reduced[name], count, statistic.around)
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def _add(self, name: str, statistic: Statistic) -> None:
        known = self._statistics.get(name)
        if known is not None:
            combine = torch.maximum if statistic.kind in ("max", "min") else torch.add
            statistic = statistic._replace(sums=combine(known.sums, statistic.sums))
        self._statistics[name] = statistic


def _sum(values: torch.Tensor) -> torch.Tensor:
    """The sum, float64 []."""
    return values.sum(dtype=torch.float64)


def _sums(values: torch.Tensor) -> torch.Tensor:
    """The sums of values and of their squares, float64 [2]."""
    return torch.stack([_sum(values), _sum(values.square())])


def _largest(values: torch.Tensor) -> torch.Tensor:
    """The largest value, float64 []; minus infinity where there is none."""
    return values.amax().double() if values.numel() else values.new_tensor(-torch.inf, dtype=torch.float64)


def _all_reduce(statistics: dict[str, Statistic], world: World | None) -> dict[str, list[float]]:
    """The sums of each statistic over all ranks, as plain numbers."""
    extremes = [name for name, one in statistics.items() if one.kind in ("max", "min")]
    scalars = [name for name, one in statistics.items() if one.sums.ndim == 0 and one.kind not in ("max", "min")]
    others = [name for name, one in statistics.items() if one.sums.ndim > 0]
    parts = [torch.stack([statistics[name].sums for name in scalars])] if scalars else []
    parts += [statistics[name].sums.reshape(-1) for name in others]
    sums = torch.cat(parts).tolist() if parts else []
    tops = torch.stack([statistics[name].sums for name in extremes]).tolist() if extremes else []
    if world is not None:
        sums, tops = world.all_reduce_sum(sums), world.all_reduce_max(tops)
    reduced = {name: [value] for name, value in zip((*scalars, *extremes), (*sums[: len(scalars)], *tops), strict=True)}
    start = len(scalars)
    for name in others:
        end = start + statistics[name].sums.numel()
        reduced[name] = sums[start:end]
        start = end
    return reduced


def _by_age_values(statistic: Statistic, reduced: dict[str, list[float]], table: list[float]) -> dict[str, float]:
    """The metrics of every age bucket that has values."""
    values = {}
    width = statistic.sums.shape[1]
    for number, age in enumerate(AGE_BUCKETS):
        sums = table[number * width : (number + 1) * width]
        for part in statistic.parts if sums[-1] else ():
            count = reduced[part.over][0] if part.over else sums[-1]
            values[part.name.format(age=age)] = VALUES[part.kind](sums[part.start :], count, 0.0)
    return values


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
