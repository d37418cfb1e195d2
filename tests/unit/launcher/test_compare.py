"""`spo compare`: which runs are one line, what differs, figures and bands by hand, and the page of all of them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.compare import Comparison, compared, comparison_panel
from launcher.folder.run import Run, read_one
from launcher.folder.statistics import Curve, bootstrap, over_runs, smoothed
from tests.support.run_folder import (
    SavedPage,
    add_evaluation,
    add_summary,
    change_config,
    finished_run,
    make_run,
    write_metrics,
)
from tests.support.spo_command import Spo


def seeds(tmp_path: Path, gains: dict[str, float], **sections: Any) -> list[Run]:
    """Runs named by the keys, of seeds 0, 1, ...; each has its data in its own folder, as quickstarts do."""
    runs = []
    for seed, (name, gain) in enumerate(gains.items()):
        data = {"data": {"train": str(tmp_path / name / "train.jsonl")}}
        runs.append(read_one(finished_run(tmp_path / name, seed=seed, gain=gain, **data, **sections)))
    return runs


def labels(comparison: Comparison) -> list[tuple[str, int]]:
    return [(line.group.label, len(line.group.runs)) for line in comparison.lines]


def test_runs_that_differ_only_in_their_seed_are_one_line(tmp_path: Path) -> None:
    runs = seeds(tmp_path, {"a": 0.1, "b": 0.05, "c": 0.12})
    comparison = compared(runs, [], None)
    (line,) = comparison.lines
    assert (len(line.group.runs), comparison.differing, comparison.warnings) == (3, {}, [])
    assert line.title == "a to c (3 runs)"
    # The mean of the last ten batches, of which there are six: 0.2 + gain * (1 + ... + 6) / 6.
    figures = line.figures
    assert figures["reward"] == pytest.approx((0.2 + 3.5 * 0.09, 0.2 + 3.5 * 0.05, 0.2 + 3.5 * 0.12))
    assert (figures["before"], figures["after"]) == ((0.5, 0.5, 0.5), (0.75, 0.75, 0.75))
    assert (figures["seconds"], figures["rate"]) == ((60.0, 60.0, 60.0), (10.0, 10.0, 10.0))
    charts = {chart["name"]: chart for chart in comparison_panel(comparison)["charts"]}
    (band,) = charts["reward-compared"]["lines"]
    assert band["x"] == [1, 2, 3, 4, 5, 6]
    assert (band["y"][0], band["low"][0], band["high"][0]) == pytest.approx((0.29, 0.25, 0.32))
    assert charts["accuracy-compared"]["lines"][0]["label"] == "a to c (3 runs)"

    runs += seeds(tmp_path, {"x": 0.1, "y": 0.1}, learner={"lr": 3e-4})
    comparison = compared(runs, [], None)
    assert labels(comparison) == [("lr=1e-06", 3), ("lr=0.0003", 2)]
    assert comparison.differing == {"learner.lr": ["1e-06", "0.0003"]}
    runs.append(read_one(finished_run(tmp_path / "z", learner={"lr": 3e-4, "weight_decay": 0.1, "dtype": "float32"})))
    assert labels(compared([runs[0], runs[-1]], [], None)) == [("a", 1), ("z", 1)], "too much differs for a label"
    by_rate = compared(runs[2:], ["learner.lr"], None)
    assert labels(by_rate) == [("lr=1e-06", 1), ("lr=0.0003", 3)]
    assert by_rate.warnings[1:] == [
        "the runs of lr=0.0003 differ in more than their seed: data.train, learner.weight_decay, learner.dtype"
    ]


def test_samples_are_counted_to_a_threshold(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "a", sampler={"batch_size": 8})
    counted = finished_run(tmp_path / "b", sampler={"batch_size": 8}, learner={"lr": 1e-3})
    for version in range(1, 7):
        write_metrics(counted, version, {"samples/rewarded": 10.0 * version})
    add_evaluation(counted, 4, {"a": [1.0, 1.0], "b": [1.0, 1.0]})
    runs = [read_one(folder), read_one(counted)]
    comparison = compared(runs, [], None)
    assert "samples to 75.0%" in comparison.columns.values()
    # Without a counter: batches times their size; with one: as it stood at the version.
    assert [line.figures["samples"] for line in comparison.lines] == [(24.0, 24.0, 24.0), (30.0, 30.0, 30.0)]
    never, late = compared(runs, [], 1.0).lines
    assert (never.figures["samples"], never.reached) == (None, 0)
    assert (late.figures["samples"], late.reached) == ((40.0, 40.0, 40.0), 1)


def test_runs_that_compare_badly_are_warned_of(tmp_path: Path) -> None:
    mine = finished_run(tmp_path / "mine")
    other = make_run(tmp_path / "other", data={"train": "else.jsonl"}, episode={"reward": "math"})
    write_metrics(other, 2, {"seconds/train": 1.0}, "learner")
    comparison = compared([read_one(mine), read_one(other)], [], None)
    assert comparison.warnings == [
        "the runs learn different tasks (data.train, episode.reward), so their figures cannot be compared",
        "not finished: other (stopped, step 2)",
        "without a held-out evaluation: other",
    ]
    assert comparison.lines[1].figures["after"] is None
    # Runs without anything, or of another release, are compared as far as they go.
    change_config(mine, learner={"forgotten": 3}, without=("learner.lr", "run.deterministic"))
    empty = make_run(tmp_path / "empty")
    add_summary(empty, finished=False, steps=0)
    comparison = compared([read_one(mine), read_one(empty)], [], None)
    assert comparison.differing == {"learner.forgotten": ["3", "–"]}
    assert comparison.lines[1].figures["reward"] is None
    charts = [chart["name"] for chart in comparison_panel(comparison)["charts"]]
    assert charts == ["lines-compared", "what-differs", "runs-compared"]


def test_runs_are_compared_on_the_terminal_and_as_a_page(spo: Spo, tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>\x1b[31m"
    for seed in range(3):
        finished_run(tmp_path / "runs" / f"mine-{seed}", seed=seed)
    finished_run(tmp_path / "runs" / "other", learner={"lr": 3e-4}, data={"system_prompt": hostile})
    ran = spo("compare", tmp_path / "runs", "-o", tmp_path / "compared.html", "--threshold", "0.7")
    assert ran.returncode == 0
    assert ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("warning: the runs learn different tasks (data.system_prompt)")
    assert "\x1b[31m" not in ran.stdout
    for text in ("lr=1e-06", "50.0%", "75.0%", "to 70.0%", "learner.lr"):
        assert text in ran.stdout
    page = SavedPage(tmp_path / "compared.html")
    assert page.data["comparison"]["title"] == "4 runs compared"
    assert {row[-1] for row in page.charts["runs-compared"]["rows"]} == {"both"}
    assert len(re.findall(r"\bboth\b", ran.stdout)) == 4
    differing = {row[0]: row[1:] for row in page.charts["what-differs"]["rows"]}
    # The newest run folder comes first.
    assert sorted(differing["learner.lr"]) == ["0.0003", "1e-06"]
    assert min(differing["data.system_prompt"]) == "<script>alert(1)</script>\\x1b[31m"
    assert len(page.data["runs"]) == len(page.data["panels"]) == 4


def test_the_command_refuses_what_cannot_be(spo: Spo, tmp_path: Path) -> None:
    one, two = (finished_run(tmp_path / name) for name in ("one", "two"))
    for arguments, words in (
        ((one, one), "alone cannot be compared"),
        ((one, tmp_path / "three"), "does not exist"),
        ((one, two, "--group-by", "learner.lrr"), "did you mean learner.lr?"),
        ((one, two, "-o", one / "config.yaml" / "page.html"), "cannot be written"),
    ):
        ran = spo("compare", *arguments)
        assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
        assert words in ran.stderr


def curve(points: dict[float, float]) -> Curve:
    return Curve(np.array(list(points), float), np.array(list(points.values()), float))


def test_the_band_over_prompts_is_that_of_all_resamples() -> None:
    values = np.array([0.0, 0.25, 0.5, 1.0, 1.0])
    means = np.sort([np.mean(draw) for draw in itertools.product(values, repeat=5)])
    low, high = np.quantile(means, (0.025, 0.975))
    # 10,000 draws of means that lie on a grid of 0.05.
    assert bootstrap(values) == (values.mean(), pytest.approx(low, abs=0.05), pytest.approx(high, abs=0.05))


def test_runs_are_compared_as_far_as_all_of_them_went() -> None:
    mean, low, high = over_runs([curve({0: 0.0, 10: 1.0, 20: 1.0}), curve({0: 0.0, 5: 0.2, 12: 0.9}), curve({})])
    assert mean.versions.tolist() == [0, 5, 10, 12]
    other = 0.2 + (0.9 - 0.2) * 5 / 7
    assert low.values == pytest.approx([0, 0.2, other, 0.9])
    assert high.values == pytest.approx([0, 0.5, 1.0, 1.0])
    assert mean.values == pytest.approx([0, 0.35, (1 + other) / 2, 0.95])
    assert len(over_runs([])[0].versions) == 0


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.integers(1, 12))
def test_smoothing_is_the_mean_of_the_last_values(values: list[float], window: int) -> None:
    by_hand = [np.mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
    assert smoothed(Curve(np.arange(len(values)), np.array(values)), window).values == pytest.approx(by_hand, abs=1e-9)
