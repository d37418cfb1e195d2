"""The least variance that a baseline by group could leave, against what it is by construction."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.values.oracle import Sample, group_oracle


def samples(rates: dict[str, float], per_version: int, versions: int) -> list[Sample]:
    random = np.random.default_rng(0)
    return [
        Sample(version, group, float(random.random() < rate))
        for version in range(versions)
        for group, rate in rates.items()
        for _ in range(per_version)
    ]


def test_groups_that_differ_leave_the_variance_within_them():
    found = group_oracle(samples({"hard": 0.1, "easy": 0.9}, per_version=64, versions=400))
    assert found == pytest.approx(0.09 / 0.25, abs=0.01)


def test_groups_that_are_alike_save_nothing_even_where_each_has_few_samples():
    alike = {str(group): 0.5 for group in range(32)}
    assert group_oracle(samples(alike, per_version=2, versions=400)) == pytest.approx(1.0, abs=0.01)
