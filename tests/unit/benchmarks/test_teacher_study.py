"""The study of teachers: curves, samples to a goal, its table, and settings that a configuration takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.teacher import ARMS, arm_options, band, curve_of, measure, samples_to, table
from common.config import load_config
from launcher.tasks import find_task


@pytest.mark.parametrize(
    ("curve", "samples"),
    [
        ([(0, 0.2), (100, 0.4), (200, 0.8)], 150.0),
        ([(0, 0.7), (100, 0.1)], 0.0),
        ([(0, 0.2), (100, 0.59)], None),
        ([(0, 0.2), (100, 0.6), (200, 0.3)], 100.0),
        ([], None),
    ],
    ids=["between", "at once", "never", "exactly", "nothing"],
)
def test_samples_are_counted_to_the_first_crossing(curve: list[tuple[int, float]], samples: float | None) -> None:
    assert samples_to(curve, 0.6) == pytest.approx(samples)


def test_a_curve_is_read_from_the_metrics() -> None:
    """An evaluation that a killed process repeated counts as it was written last."""
    values = [(0, {"validation/accuracy": 0.1}), (1, {"reward/mean": 1.0}), (2, {"validation/accuracy": 0.3})]
    lines = [json.dumps({"version": version, "values": found}) for version, found in [*values, (2, values[0][1])]]
    assert curve_of(lines, 128) == [(0, 0.1), (256, 0.1)]


def test_the_table_has_seeds_and_bands() -> None:
    rows = [
        {"arm": arm, "seed": seed, "steps": 40, "curve": [(0, 0.0), (500, 0.25), (1000, accuracy), (1500, accuracy)]}
        for arm, accuracies in (("self", (0.75, 0.45)), ("reward", (0.5, 0.75)))
        for seed, accuracy in enumerate(accuracies)
    ]
    heading, _, reward, told = table(rows).splitlines()
    assert "samples to 50%, by seed" in heading
    assert reward == "| reward | 40 | 1,000, 750 | 875 ± 250 | 37.5 ± 12.5 | 41.7, 58.3 | 50.0 ± 16.7 |"
    assert told == "| self | 40 | 750, never | 1 of 2 reach it | 36.2 ± 15.0 | 58.3, 38.3 | 48.3 ± 20.0 |"
    assert band([1.0], 1) == "1.0 ± nan"


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_configuration(arm: str) -> None:
    config = load_config(find_task("gym").template, arm_options(arm, Path("somewhere/hf")))
    assert bool(config.teachers_in_use()) == (arm != "reward")
    assert config.teacher.model == ("somewhere/hf" if arm in ("teacher", "teacher + reward", "top k") else None)


def test_rows_that_are_there_are_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"arm": "reward", "seed": 0, "steps": 40, "curve": [[0, 0.0], [1000, 0.8]], "seconds": 1}
    path.write_text(json.dumps(row) + "\n")
    assert measure(["reward"], [0], 40, tmp_path, path) == [row]
