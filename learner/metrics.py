"""Statistics of a batch before it is trained on, and the time that each phase of a step takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.config import AGE_BUCKETS
from learner.batch import RolloutBatch
from learner.correction.statistics import age_buckets
from learner.stats import Stats


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


def batch_statistics(batch: RolloutBatch, stats: Stats) -> None:
    """Samples, tokens, and the tokens' ages in weight versions."""
    ages = torch.cat([micro.ages(batch.version) for micros in batch.mini_batches for micro in micros])
    stats.total("batch/left_out", float(batch.left_out))
    stats.total("tokens/total", float(batch.tokens))
    stats.total("tokens/model", float(len(ages)))
    stats.mean("staleness/mean", ages, over="tokens/model")
    stats.max("staleness/max", ages)
    bucket = age_buckets(ages)
    for number, age in enumerate(AGE_BUCKETS):
        stats.mean(f"staleness/{age}", bucket == number, over="tokens/model")
