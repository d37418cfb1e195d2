"""What one batch tells about itself: sums over micro-batches and ranks, turned into means at the end."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.config import AGE_BUCKETS, AlgorithmConfig
from learner.batch import RolloutBatch
from learner.correction import Totals, correction_metrics
from learner.correction.ages import buckets
from learner.world import World


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


def summed(totals: dict[str, float], world: World) -> dict[str, float]:
    """Totals summed over ranks; every rank must hold the same names."""
    names = sorted(totals)
    return dict(zip(names, world.all_reduce_sum([totals[name] for name in names]), strict=True))


def step_metrics(totals: Totals, steps: int, config: AlgorithmConfig) -> dict[str, float]:
    """`actor/...`, `rollout_corr/...` and `proximal/...` of a batch, from the totals over ranks and micro-batches.

    Losses are means over the `steps` optimizer steps, the rest means over tokens: of the policy loss's own
    statistics over the tokens that were learned from, of the correction over all.
    """
    sums = {"learned_tokens": 0.0, "tokens": 0.0, "actor/entropy": 0.0} | totals.sums
    policy, kl, entropy = (value / max(steps, 1) for value in totals.tables.get("parts", [[0.0] * 3])[0])
    found = {"actor/pg_loss": policy, "actor/loss": policy + config.kl_coef * kl - config.entropy_coef * entropy}
    if config.kl_coef:
        found["actor/kl_loss"] = kl
    learned, tokens = max(sums["learned_tokens"], 1.0), max(sums["tokens"], 1.0)
    found |= {name: value / learned for name, value in sums.items() if name.startswith("actor/")}
    if config.negative_max_prob < 1:
        found["actor/negative_filtered"] = sums["negative_filtered"] / tokens
    for name in ("error", "bias", "moved", "away"):
        if f"proximal_{name}" in sums:
            found[f"proximal/{name}"] = sums[f"proximal_{name}"] / tokens
    metrics = correction_metrics(totals, config.correction) if totals.sums else {}
    return found | {f"rollout_corr/{name}": value for name, value in metrics.items()}


def batch_counts(batch: RolloutBatch) -> dict[str, float]:
    """This rank's counts of samples, tokens and token ages; `staleness/*` are sums to be divided by tokens."""
    counts = {"batch/left_out": float(batch.left_out), "tokens/total": float(batch.tokens)}
    ages = torch.cat([batch.version - micro.versions for micro in _micro_batches(batch)])
    by_age = torch.bincount(buckets(ages), minlength=len(AGE_BUCKETS)).tolist()
    counts |= {"tokens/model": float(len(ages)), "staleness/mean": float(ages.sum())}
    return counts | {f"staleness/{name}": float(count) for name, count in zip(AGE_BUCKETS, by_age, strict=True)}


def oldest_age(batch: RolloutBatch) -> float:
    """Largest age of any token of this rank, in versions; 0 without tokens."""
    ages = [batch.version - micro.versions for micro in _micro_batches(batch)]
    return max((float(age.max()) for age in ages if len(age)), default=0.0)


def per_token(counts: dict[str, float]) -> dict[str, float]:
    """Turn the staleness sums of `batch_counts` into means."""
    tokens = max(counts["tokens/model"], 1.0)
    return {name: value / tokens if name.startswith("staleness/") else value for name, value in counts.items()}


def _micro_batches(batch: RolloutBatch) -> Iterator:
    return (micro for micros in batch.mini_batches for micro in micros)
