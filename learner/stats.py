"""Metrics of a step: statistics of its batch, and the seconds of its phases."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

import torch

from common.config import AGE_BUCKETS
from common.log import Timeline
from learner.ranks.world import World


class Figure(NamedTuple):
    """One figure of a statistic.

    Attributes:
        kind: a key of `VALUES`.
        start: column of the statistic at which its sums begin.
        over: name of the total that the sums are divided by; None in a statistic by age means the number of values.
        around: subtracted from the values before they were summed, so that a tiny spread survives the subtraction.
    """

    name: str
    kind: str
    start: int = 0
    over: str | None = None
    around: float = 0.0


class Statistic(NamedTuple):
    """The sums of one call, and the metrics made of them.

    Attributes:
        sums: of values, of values and their squares, or extremes; float64 [K], by age bucket [A, K + 1], whose last
            column is the number of values; of loads [layers, experts]. A minimum is kept as the maximum of the negative
            values.
        metrics: the metrics computed from the columns.
        extremes: whether the largest is kept instead of the sum.
    """

    sums: torch.Tensor
    metrics: tuple[Figure, ...]
    extremes: bool = False


class Stats:
    """Named statistics. The set of names depends on the configuration alone, never on the data.

    A name with a slash is a metric; one without is a total that others are divided by.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Statistic] = {}  # by the name of the first metric

    def total(self, name: str, values: torch.Tensor | float) -> None:
        self._add(Statistic(_sum(torch.as_tensor(values)), (Figure(name, "total"),)))

    def mean(self, name: str, values: torch.Tensor | float, over: str, around: float = 0.0) -> None:
        """The sum of the values divided by the total `over`; 0 if that is 0."""
        values = torch.as_tensor(values)
        metric = Figure(name, "mean", 0, over, around)
        self._add(Statistic(_sum(values - around if around else values), (metric,)))

    def means(self, values: dict[str, torch.Tensor], over: str, where: torch.Tensor | None = None) -> None:
        """The means of several values [N] by name, summed together; `where`, bool [N], selects the values."""
        table = torch.stack([*values.values()])
        if where is not None:
            table = table & where if table.dtype == torch.bool else torch.where(where, table, 0)
        sums = table.sum(1, dtype=torch.float64)
        self._add(Statistic(sums, tuple(Figure(name, "mean", column, over) for column, name in enumerate(values))))

    def std(self, name: str, values: torch.Tensor, over: str, around: float = 0.0, sample: bool = False) -> None:
        """Standard deviation of the values; `sample` divides by one less than their number."""
        metric = Figure(name, "sample_std" if sample else "std", 0, over)
        self._add(Statistic(_sums(values - around if around else values), (metric,)))

    def effective_sample_size(self, name: str, weights: torch.Tensor, over: str) -> None:
        """(sum w)^2 / (n sum w^2) of the weights, between 0 and 1."""
        self._add(Statistic(_sums(weights), (Figure(name, "effective_sample_size", 0, over),)))

    def by_age(
        self,
        bucket: torch.Tensor,
        means: dict[str, torch.Tensor],
        effective_sample_sizes: dict[str, torch.Tensor],
        share: str,
        over: str,
    ) -> None:
        """Statistics of each age bucket, whose names hold `{age}`; a bucket without values is left out.

        Args:
            bucket: age bucket of each value, int64 [N].
            means: values [N] by name.
            effective_sample_sizes: weights [N] by name.
            share: name of the bucket's number of values divided by the total `over`.
        """
        columns = [*means.values()]
        metrics = [Figure(name, "mean", column) for column, name in enumerate(means)]
        for name, weights in effective_sample_sizes.items():
            metrics.append(Figure(name, "effective_sample_size", len(columns)))
            columns += [weights, weights.square()]
        metrics.append(Figure(share, "mean", len(columns), over))
        # One pass over the tokens for all of them. A product is faster than `index_add`, and deterministic on a GPU.
        ones = torch.ones(len(bucket), dtype=torch.float64, device=bucket.device)
        table = torch.stack([*(values.double() for values in columns), ones])
        in_bucket = bucket == torch.arange(len(AGE_BUCKETS), device=bucket.device)[:, None]
        self._add(Statistic(in_bucket.double() @ table.T, tuple(metrics)))

    def extremes(
        self,
        largest: dict[str, torch.Tensor],
        smallest: dict[str, torch.Tensor],
        where: torch.Tensor | None = None,
    ) -> None:
        """The largest and smallest values [N] by name, where `where`, bool [N], holds; left out without values."""
        table = torch.stack([*largest.values(), *(-values for values in smallest.values())]).double()
        if where is not None:
            table = torch.where(where, table, -torch.inf)
        tops = table.amax(1) if table.numel() else table.new_full((len(table),), -torch.inf)
        kinds = [*((name, "max") for name in largest), *((name, "min") for name in smallest)]
        metrics = tuple(Figure(name, kind, column) for column, (name, kind) in enumerate(kinds))
        self._add(Statistic(tops, metrics, extremes=True))

    def loads(self, name: str, counts: torch.Tensor) -> None:
        """The loads of experts relative to their layer's mean, from how often each was chosen [layers, experts].

        `NAME/load_max` and `NAME/load_min` are the largest and the smallest of all; `NAME/load_max_mean` and
        `NAME/load_min_mean` are the means over layers of each layer's extremes. Left out if no expert was chosen.
        """
        self._add(Statistic(counts.double(), tuple(Figure(f"{name}/{kind}", kind) for kind in LOADS)))

    def update(self, other: Stats) -> None:
        for entry in other._entries.values():
            self._add(entry)

    def reduce(self, world: World | None = None, names: Collection[str] | None = None) -> dict[str, float]:
        """Finite values over all ranks, of every metric or only of `names`; all ranks must ask for the same."""
        entries = self._entries if names is None else self._entries_of(names)
        sums_by_entry = _all_reduce(entries, world)
        values: dict[str, float] = {}
        for first, entry in entries.items():
            sums = sums_by_entry[first]
            if entry.metrics[0].kind in LOADS:
                values |= _load_values(entry, sums)
                continue
            if entry.sums.ndim == 2:
                values |= _by_age_values(entry, sums, sums_by_entry)
                continue
            for name, kind, start, over, around in entry.metrics:
                if name in names if names is not None else "/" in name:
                    count = sums_by_entry[over][0] if over else 0.0
                    values[name] = VALUES[kind](sums[start:] if start else sums, count, around)
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def _entries_of(self, names: Collection[str]) -> dict[str, Statistic]:
        """The entries with these metrics, and those with the totals they are divided by."""
        wanted = {
            name: [metric for metric in one.metrics if metric.name in names] for name, one in self._entries.items()
        }
        totals = {metric.over for metrics in wanted.values() for metric in metrics}
        return {name: one for name, one in self._entries.items() if wanted[name] or name in totals}

    def _add(self, entry: Statistic) -> None:
        first = entry.metrics[0].name
        earlier = self._entries.get(first)
        if earlier is not None:
            combine = torch.maximum if entry.extremes else torch.add
            entry = entry._replace(sums=combine(earlier.sums, entry.sums))
        self._entries[first] = entry


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.sum(dtype=torch.float64).view(1)


def _sums(values: torch.Tensor) -> torch.Tensor:
    """The sums of values and of their squares, float64 [2]."""
    values = values.double()
    return torch.stack([values.sum(), values.dot(values)])


def _all_reduce(entries: dict[str, Statistic], world: World | None) -> dict[str, list[float]]:
    """The sums of each entry over all shares of a batch, as plain numbers."""
    sums, tops = _plain(entries, extremes=False), _plain(entries, extremes=True)
    if world is not None:
        sums, tops = world.sum_over_shares(sums), world.all_reduce_max(tops)
    reduced, starts = {}, {False: 0, True: 0}
    for name, entry in entries.items():
        start = starts[entry.extremes]
        end = starts[entry.extremes] = start + entry.sums.numel()
        reduced[name] = (tops if entry.extremes else sums)[start:end]
    return reduced


def _plain(entries: dict[str, Statistic], extremes: bool) -> list[float]:
    """All sums in order, with one transfer from each GPU."""
    kept = [entry.sums for entry in entries.values() if entry.extremes == extremes]
    parts = [sums if sums.ndim == 1 else sums.view(-1) for sums in kept]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for part in parts:
        by_device.setdefault(part.device, []).append(part)
    numbers = {device: iter(torch.cat(own).tolist()) for device, own in by_device.items()}
    return [number for part in parts for number in islice(numbers[part.device], len(part))]


def _by_age_values(entry: Statistic, table: list[float], totals: dict[str, list[float]]) -> dict[str, float]:
    """The metrics of every age bucket that has values."""
    values = {}
    width = entry.sums.shape[1]
    for number, age in enumerate(AGE_BUCKETS):
        sums = table[number * width : (number + 1) * width]
        for name, kind, start, over, around in entry.metrics if sums[-1] else ():
            count = totals[over][0] if over else sums[-1]
            values[name.replace("{age}", age)] = VALUES[kind](sums[start:], count, around)
    return values


def _load_values(entry: Statistic, sums: list[float]) -> dict[str, float]:
    """The metrics of loads; a layer's mean load is the same in all layers."""
    layers, experts = entry.sums.shape
    mean = sum(sums) / len(sums)
    if not mean:
        return {}
    rows = [sums[start : start + experts] for start in range(0, len(sums), experts)]
    largest, smallest = [max(row) / mean for row in rows], [min(row) / mean for row in rows]
    figures = (max(largest), min(smallest), sum(largest) / layers, sum(smallest) / layers)
    return {metric.name: figure for metric, figure in zip(entry.metrics, figures, strict=True)}


def _mean(sums: list[float], count: float, around: float) -> float:
    return around + sums[0] / count if count else 0.0


def _std(sums: list[float], count: float, around: float) -> float:
    return math.sqrt(max(sums[1] / count - (sums[0] / count) ** 2, 0.0)) if count else 0.0


def _sample_std(sums: list[float], count: float, around: float) -> float:
    return math.sqrt(max(sums[1] - count * (sums[0] / count) ** 2, 0.0) / (count - 1)) if count > 1 else 0.0


def _effective_sample_size(sums: list[float], count: float, around: float) -> float:
    return min(1.0, sums[0] ** 2 / (count * sums[1])) if sums[1] > 0 else 0.0


LOADS = ("load_max", "load_min", "load_max_mean", "load_min_mean")
VALUES: dict[str, Callable[[list[float], float, float], float]] = {
    "total": lambda sums, count, around: sums[0],
    "mean": _mean,
    "std": _std,
    "sample_std": _sample_std,
    "effective_sample_size": _effective_sample_size,
    "max": lambda sums, count, around: sums[0],
    "min": lambda sums, count, around: -sums[0],
}


class Phases:
    """Seconds spent in each phase of a step, which are recorded on a timeline."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._timeline = timeline or Timeline(None, "")
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`."""
        began, start = time.time(), time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.seconds[name] += seconds
            self._timeline.slice(name, began, began + seconds, lane="step")

    def metrics(self) -> dict[str, float]:
        return {f"seconds/{name}": value for name, value in self.seconds.items()}
