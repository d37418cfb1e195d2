"""Runs side by side: which are one line, what differs, and their figures by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from launcher.compare.comparison import Comparison, compared
from launcher.compare.figures import LineFigures, comparison_charts
from launcher.compare.text import cells
from launcher.report.run_data import RunData, read_run
from launcher.report.statistics import Band
from tests.support.run_folder import add_evaluation, add_metrics, add_summary, change_config, finished_run, make_run


def read(folder: Path) -> RunData:
    return read_run(folder, ask_redis=False)


def seeds(tmp_path: Path, gains: dict[str, float], **sections: Any) -> list[RunData]:
    """Runs named by the keys, of seeds 0, 1, ...; each has its data in its own folder, as quickstarts do."""
    runs = []
    for seed, (name, gain) in enumerate(gains.items()):
        data = {"data": {"train": str(tmp_path / name / "train.jsonl")}}
        runs.append(read(finished_run(tmp_path / name, seed=seed, gain=gain, **data, **sections)))
    return runs


def labels(comparison: Comparison) -> list[str]:
    return [line.label for line in comparison.lines]


def test_runs_that_differ_only_in_their_seed_are_one_line_with_mean_lowest_and_highest(tmp_path: Path) -> None:
    comparison = compared(seeds(tmp_path, {"a": 0.1, "b": 0.05, "c": 0.12}), [], None)
    (line,) = comparison.lines
    assert (line.runs, comparison.differing, comparison.warnings) == (3, {}, [])
    assert line.label == "a to c"
    # The mean of the last ten batches, of which there are six: 0.2 + gain * (1 + ... + 6) / 6.
    assert line.reward == pytest.approx((0.2 + 3.5 * 0.09, 0.2 + 3.5 * 0.05, 0.2 + 3.5 * 0.12))
    assert (line.before, line.after) == ((0.5, 0.5, 0.5), (0.75, 0.75, 0.75))
    assert line.seconds == (60.0, 60.0, 60.0)
    assert line.tokens_per_second == (10.0, 10.0, 10.0)
    (accuracy, reward, *_) = comparison_charts(comparison.groups)
    (band,) = reward.lines
    assert band.versions.tolist() == [1, 2, 3, 4, 5, 6]
    assert (band.values[0], band.lows[0], band.highs[0]) == pytest.approx((0.29, 0.25, 0.32))
    assert accuracy.lines[0].label == "a to c (3 runs)"


def test_what_else_differs_makes_lines_and_names_them(tmp_path: Path) -> None:
    runs = seeds(tmp_path, {"a": 0.1, "b": 0.1}) + seeds(tmp_path, {"x": 0.1, "y": 0.1}, learner={"lr": 3e-4})
    comparison = compared(runs, [], None)
    assert labels(comparison) == ["lr=1e-06", "lr=0.0003"]
    assert comparison.differing == {"learner.lr": ["1e-06", "0.0003"]}
    others = {"lr": 1e-3, "weight_decay": 0.1, "dtype": "float32"}
    many = compared([runs[0], read(finished_run(tmp_path / "z", learner=others))], [], None)
    assert labels(many) == ["a", "z"]


def test_lines_may_be_made_by_some_keys_alone(tmp_path: Path) -> None:
    runs = [
        read(finished_run(tmp_path / f"{lr}-{decay}", learner={"lr": lr, "weight_decay": decay}))
        for lr in (1e-5, 1e-4)
        for decay in (0.0, 0.1)
    ]
    comparison = compared(runs, ["learner.lr"], None)
    assert [(line.label, line.runs) for line in comparison.lines] == [("lr=1e-05", 2), ("lr=0.0001", 2)]
    assert comparison.warnings == [
        "the runs of lr=1e-05 differ in more than their seed: learner.weight_decay",
        "the runs of lr=0.0001 differ in more than their seed: learner.weight_decay",
    ]
    with pytest.raises(UserError, match=r"learner\.lrr: the runs have no such key; did you mean learner\.lr\?"):
        compared(runs, ["learner.lrr"], None)


def test_samples_are_counted_to_the_threshold_that_all_reached_or_the_one_that_is_asked_for(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "a", sampler={"batch_size": 8})
    counted = finished_run(tmp_path / "b", sampler={"batch_size": 8}, learner={"lr": 1e-3})
    for version in range(1, 7):
        add_metrics(counted, version, "sampler", samples__rewarded=10.0 * version)
    add_evaluation(counted, 4, {"a": [1.0, 1.0], "b": [1.0, 1.0]})
    runs = [read(folder), read(counted)]
    comparison = compared(runs, [], None)
    assert "samples to 75.0%" in comparison.columns
    # Without a counter: batches times their size; with one: as it stood at the version.
    assert [line.samples for line in comparison.lines] == [(24.0, 24.0, 24.0), (30.0, 30.0, 30.0)]
    never, late = compared(runs, [], 1.0).lines
    assert (never.samples, never.reached) == (None, 0)
    assert (late.samples, late.reached) == ((40.0, 40.0, 40.0), 1)


def test_other_tasks_unfinished_runs_and_missing_evaluations_are_warned_of(tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", data={"train": "else.jsonl"}, episode={"reward": "math"})
    add_metrics(other, 2, "learner", seconds__train=1.0)
    comparison = compared([read(finished_run(tmp_path / "mine")), read(other)], [], None)
    assert comparison.warnings == [
        "the runs learn different tasks (data.train, episode.reward), so their figures cannot be compared",
        "not finished: other (not finished: stopped at step 2 of 6)",
        "without a held-out evaluation: other",
    ]
    assert comparison.lines[1].after is None


def test_runs_of_other_releases_and_without_anything_are_compared_as_far_as_they_go(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "old")
    change_config(folder, learner={"forgotten": 3}, without=("learner.lr", "run.deterministic"))
    empty = make_run(tmp_path / "empty")
    add_summary(empty, finished=False, steps=0)
    comparison = compared([read(folder), read(empty)], [], None)
    assert comparison.differing == {"learner.forgotten": ["3", "–"]}
    assert comparison.lines[1].reward is None
    assert [chart.name for chart in comparison_charts(comparison.groups)] == ["accuracy", "reward", "throughput"]


def test_a_range_has_its_unit_once() -> None:
    bands = [Band(0.5, 0.4, 0.6), Band(0.5, 0.5, 0.5), Band(100.0, 80.0, 120.0), Band(7000.0, 5400.0, 9000.0), None]
    line = LineFigures("a", 2, bands[0], bands[1], bands[4], bands[4], bands[3], bands[4], 0)
    assert cells(line)[:2] == ["50.0% (40.0–60.0%)", "50.0%"]
    assert cells(line)[4] == "1 h 57 min (1 h 30 min–2 h 30 min)"
    assert cells(replace(line, seconds=bands[2]))[4] == "2 min (80 s–2 min)"
    assert cells(replace(line, seconds=Band(200.0, 120.0, 300.0)))[4] == "3 min (2–5 min)"
