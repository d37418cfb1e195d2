"""What one batch tells about itself: sums over micro-batches and ranks, turned into means at the end."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from learner.batch import RolloutBatch
from learner.world import World

# Upper ends of the staleness buckets, in versions; the last is open.
AGES = {"age_0": 0, "age_1": 1, "age_2": 2, "age_3_4": 4}


class Phases:
    """Seconds spent in each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`seconds/<phase>`."""
        return {f"seconds/{name}": value for name, value in self.seconds.items()}


def add(totals: dict[str, float], values: dict[str, float]) -> None:
    """Add values to totals by name."""
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + value


def summed(totals: dict[str, float], world: World) -> dict[str, float]:
    """Totals summed over ranks; every rank must hold the same names."""
    names = sorted(totals)
    return dict(zip(names, world.sums([totals[name] for name in names]), strict=True))


def batch_counts(batch: RolloutBatch) -> dict[str, float]:
    """This rank's counts of samples, tokens and token ages; `staleness/*` are sums to be divided by tokens."""
    counts = {"batch/left_out": float(batch.left_out), "tokens/total": float(batch.tokens), "tokens/model": 0.0}
    counts |= {f"staleness/{name}": 0.0 for name in ("mean", *AGES, "age_5_plus")}
    for micro in _micro_batches(batch):
        ages = (batch.version - micro.versions)[micro.mask]
        counts["tokens/model"] += len(ages)
        counts["staleness/mean"] += float(ages.sum())
        below = 0
        for name, top in AGES.items():
            upto = int((ages <= top).sum())
            counts[f"staleness/{name}"] += upto - below
            below = upto
        counts["staleness/age_5_plus"] += len(ages) - below
    return counts


def oldest_age(batch: RolloutBatch) -> float:
    """Largest age of any token of this rank, in versions; 0 without tokens."""
    ages = [(batch.version - micro.versions)[micro.mask] for micro in _micro_batches(batch)]
    return max((float(age.max()) for age in ages if len(age)), default=0.0)


def per_token(counts: dict[str, float]) -> dict[str, float]:
    """Turn the staleness sums of `batch_counts` into means."""
    tokens = max(counts["tokens/model"], 1.0)
    return {name: value / tokens if name.startswith("staleness/") else value for name, value in counts.items()}


def all_rows(rows: list[torch.Tensor], world: World) -> torch.Tensor:
    """Rows of micro-batches of different widths, of all ranks, as one [B, T] padded with zeros."""
    width = max(row.shape[1] for row in rows)
    local = torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[1])) for row in rows])
    return world.gather_rows(local)


def _micro_batches(batch: RolloutBatch) -> Iterator:
    return (micro for micros in batch.mini_batches for micro in micros)
