"""What baselines leave of the variance: the least by group."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.values.oracle import Sample, group_oracle


@pytest.mark.parametrize(
    ("rates", "per_version", "variance"),
    [
        ({"hard": 0.1, "easy": 0.9}, 64, 0.09 / 0.25),
        ({str(group): 0.5 for group in range(32)}, 2, 1.0),  # alike: nothing is saved, though each has few samples
    ],
    ids=["groups that differ", "groups that are alike"],
)
def test_groups_leave_the_variance_within_them(rates: dict[str, float], per_version: int, variance: float) -> None:
    random = np.random.default_rng(0)
    samples = [
        Sample(version, group, float(random.random() < rate))
        for version in range(400)
        for group, rate in rates.items()
        for _ in range(per_version)
    ]
    assert group_oracle(samples) == pytest.approx(variance, abs=0.01)
