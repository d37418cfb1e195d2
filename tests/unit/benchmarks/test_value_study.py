"""What baselines leave of the variance, the least by group; and the table of the study."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.values.oracle import Sample, group_oracle
from benchmarks.values.study import StudyRun, table


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


def test_methods_are_compared_by_seed_within_a_task_batch_and_number_of_visits() -> None:
    def row(*accuracy: float, seconds: float) -> dict[str, Any]:
        curve = [[10 * i, value] for i, value in enumerate(accuracy)]
        times = [i * seconds / (len(accuracy) - 1) for i in range(len(accuracy))]
        figures = {"variance_ratio": 0.5, "without_signal": None, "offline_seconds": 0.0, "training_seconds": times}
        return {"accuracy": curve} | figures

    def run(method: str, seed: int, batch: int = 16) -> StudyRun:
        return StudyRun("gym", method, 3.0, 0, seed, 20, batch)

    rows = {
        run("spo", 0): row(0.2, 0.4, 0.6, seconds=10.0),
        run("spo", 1): row(0.4, 0.6, 0.8, seconds=10.0),
        run("critic", 0): row(0.2, 0.5, 0.8, seconds=20.0),
        run("critic", 1): row(0.4, 0.7, 1.0, seconds=20.0),
        run("critic", 2): row(0.0, 0.0, 0.0, seconds=20.0),  # no spo of its seed
        run("critic", 0, batch=128): row(0.1, 0.1, 0.1, seconds=5.0),
    }
    spo, critic, other = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(rows).splitlines()[2:]]
    assert spo[:7] == ["gym", "16", "3", "0", "spo", "0.700 ± 0.200", "0.500 ± 0.200"]
    # Each is 0.1 ahead of spo over the run; when spo is done, the critic is half way.
    assert critic[4:] == [
        "critic", "0.600 ± 0.611", "0.400 ± 0.416", "0.100 ± 0.000", "0.400 ± 0.416", "0.500 ± 0.000", "–", "20", "3"
    ]  # fmt: skip
    assert other[:5] == ["gym", "128", "3", "0", "critic"]
    assert other[7] == "–"
