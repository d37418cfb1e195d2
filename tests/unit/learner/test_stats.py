"""Statistics are declared once and add up: over micro-batches, and over ranks that may have no tokens at all."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from learner.stats import Stats

VALUES = [0.5, -1.0, 2.0, 7.0, 7.0]
AGES = [0, 1, 1, 4, 0]


def declared(values: list[float], ages: list[int]) -> Stats:
    stats, tensor = Stats(), torch.tensor(values, dtype=torch.float64)
    bucket = torch.tensor(ages, dtype=torch.int64)
    stats.total("tokens", torch.ones_like(tensor))
    stats.total("batch/sum", tensor)
    stats.mean("a/mean", tensor, over="tokens")
    stats.mean("a/centred", tensor, over="tokens", around=3.0)
    stats.mean("a/share", tensor > 1, over="tokens")
    stats.std("a/std", tensor, over="tokens", around=1.0)
    stats.std("a/sample_std", tensor, over="tokens", around=2.0, sample=True)
    stats.effective_sample_size("a/ess", tensor, over="tokens")
    stats.extremes({"a/max": tensor}, {"a/min": tensor})
    stats.extremes({"a/oldest": bucket}, {})
    stats.by_age(bucket, {"{age}/mean": tensor}, {"{age}/ess": tensor}, share="{age}/fraction", over="tokens")
    return stats


EXPECTED = {
    "batch/sum": 15.5,
    "a/mean": 3.1,
    "a/centred": 3.1,
    "a/share": 3 / 5,
    "a/std": statistics.pstdev(VALUES),
    "a/sample_std": statistics.stdev(VALUES),
    "a/ess": 15.5**2 / (5 * sum(value**2 for value in VALUES)),
    "a/max": 7.0,
    "a/min": -1.0,
    "a/oldest": 4,
    "age_0/mean": 3.75,
    "age_1/mean": 0.5,
    "age_5_plus/mean": 7.0,
    "age_0/ess": 7.5**2 / (2 * (0.5**2 + 7.0**2)),
    "age_1/ess": 1.0 / (2 * 5.0),
    "age_5_plus/ess": 1.0,
    "age_0/fraction": 2 / 5,
    "age_1/fraction": 2 / 5,
    "age_5_plus/fraction": 1 / 5,
}


@pytest.mark.parametrize("cut", range(len(VALUES) + 1))
def test_parts_have_the_values_of_the_formulas(cut):
    stats = declared(VALUES[:cut], AGES[:cut])
    stats.update(declared(VALUES[cut:], AGES[cut:]))
    assert stats.reduce() == pytest.approx(EXPECTED)
    # Totals without a slash are no metrics, but can be asked for.
    assert stats.reduce(names=["tokens", "a/max"]) == {"tokens": 5.0, "a/max": 7.0}


def test_means_over_nothing_are_zero_and_extremes_left_out():
    metrics = declared([], []).reduce()
    assert metrics["a/mean"] == metrics["a/std"] == metrics["a/ess"] == 0
    assert not {"a/max", "a/min", "a/oldest", "age_0/mean"} & metrics.keys()


def test_tiny_spreads_survive_and_nan_is_left_out():
    stats, values = Stats(), 1 + 1e-9 * torch.tensor([1.0, -1.0], dtype=torch.float64)
    stats.total("tokens", torch.ones(2))
    stats.std("a/std", values, over="tokens", around=1.0)
    stats.mean("a/mean", torch.tensor([math.nan]), over="tokens")
    assert stats.reduce() == {"a/std": pytest.approx(1e-9, rel=1e-6)}
