"""The head-to-head's rows: accuracy and times from them, and settings that must be those of the study."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.head_to_head import page, runs
from common.config import load_config
from common.errors import UserError

SETTINGS = {"batch": 64, "samples": 4, "steps": 40, "every": 20}


def row(arm: str, seed: int, step_seconds: float, right: dict[str, int]) -> dict[str, Any]:
    """A run of 40 steps with so many right answers of 4 to each of two prompts at its checkpoints."""
    step = {"reward": 0.5, "tokens": 10.0, "no_signal": 0.25} | ({"variance_ratio": 0.8} if arm == "spo" else {})
    steps = [
        step | {"time": i * step_seconds, "cpu": {"learner": i * step_seconds, "generator": 5.0}} for i in range(40)
    ]
    heldout = {name: {"a": count, "b": count} for name, count in right.items()}
    return {"arm": arm, "seed": seed, "settings": SETTINGS, "steps": steps, "heldout": heldout}


ROWS = [
    row("start", 0, 0.0, {"0": 0}) | {"steps": []},
    row("spo", 0, 1.0, {"20": 2, "40": 3}),
    row("spo", 1, 1.0, {"20": 2, "40": 4}),
    row("trl", 0, 2.0, {"20": 1, "40": 2}),
]


def test_a_curve_begins_with_the_initial_model() -> None:
    points = page.curve(ROWS[1], start=0.125)
    assert points.tolist() == [[0, 0, 0, 0.125], [20, 19, 19, 0.5], [40, 39, 39, 0.75]]


@pytest.mark.parametrize(("goal", "seconds"), [(0.5, 19.0), (0.625, 29.0), (0.25, 9.5), (0.0, 0.0)])
def test_a_goal_is_reached_between_checkpoints(goal: float, seconds: float) -> None:
    assert page.seconds_to(goal, page.curve(ROWS[1], 0.0)) == pytest.approx(seconds)


def test_a_goal_that_is_not_reached_has_no_time() -> None:
    assert math.isnan(page.seconds_to(0.9, page.curve(ROWS[1], 0.0)))


def test_the_table_compares_arms_by_seed() -> None:
    lines = page.table(ROWS).splitlines()[4:]
    assert [line.strip("| ").split(" | ") for line in lines[:2]] == [
        # TRL ends at 50% after 78 s, where SPO is after 19.
        ["SPO", "50.0%", "87.5%", "75.0, 100.0%", "45.8%", "1.0", "1.0", "25%", "0.80", "10.0", f"{19 / 78:.2f}"],
        ["TRL's GRPO", "25.0%", "50.0%", "50.0%", "25.0%", "2.0", "2.0", "25%", "", "10.0", "1.00"],
    ]
    # Only seed 0 has both: 75% beside 50%, on each prompt.
    assert lines[2].startswith("| SPO less TRL's GRPO | 25.0 ± 0.0 | 25.0 ± 0.0 | 25.0 |")
    assert len(lines) == 3


def test_a_lead_has_its_error_over_prompts_and_over_seeds() -> None:
    ours, theirs = ({"settings": SETTINGS, "heldout": {"20": {"a": a, "b": b}}} for a, b in ((4, 2), (2, 2)))
    assert page.lead([(ours, theirs)], "20") == "25.0 ± 50.0"
    assert page.lead([(ours, theirs), (theirs, theirs)], "20") == "12.5 ± 25.0 (25.0)"


def test_a_sample_takes_so_much_of_each_process_and_of_the_passes_alone() -> None:
    """Of 40 steps the first is not counted; a batch has 64 samples."""
    bare = {"arm": "bare", "seed": 0, "settings": SETTINGS, "bare": {"vllm": 0.25, "deepspeed": 0.5, "tokens": 9.0}}
    lines = page.passes([row("spo", 0, 64.0, {}), row("spo", 1, 128.0, {}), bare]).splitlines()[2:]
    assert lines == [
        "| SPO | 1.50 | 0.00 | 1.50 | 10.0 |",
        "| DeepSpeed and vLLM alone | 0.50 | 0.25 | 0.75 | 9.0 |",
    ]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    page.plot(ROWS, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_rows_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[1]) + "\n")
    assert runs.read_rows(path, SETTINGS) == [ROWS[1]]
    with pytest.raises(UserError, match=r"steps = 40, and 60 is asked for; give another --results"):
        runs.read_rows(path, SETTINGS | {"steps": 60})
    assert runs.read_rows(tmp_path / "none.jsonl") == []


@pytest.mark.integration
def test_a_python_without_trl_is_refused(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(UserError, match=r"has no TRL; .* -m pip install trl==1\.16\.0"):
        runs.check_trl(bare)


@pytest.mark.integration
def test_a_task_trains_on_no_prompt_that_is_held_out(tmp_path: Path) -> None:
    config = load_config(runs.task_file("sums", tmp_path))
    sides = [config.data.sources("train")[0], config.data.sources("heldout")[0]]
    train, heldout = ([row["prompt"] for row in rows] for rows in map(runs.rows_of, sides))
    assert len(heldout) == 200
    assert len(train) == len(set(train)) > 800
    assert not set(train) & set(heldout)


def test_the_same_settings_reach_both_sides() -> None:
    config = load_config(runs.CONFIG)
    common = runs.settings(config, 60, 20, 4)
    grpo = runs.trl_settings(config, common, 7, Path("x"))["grpo"]
    assert (grpo["per_device_train_batch_size"], grpo["learning_rate"]) == (
        config.sampler.batch_size,
        config.learner.lr,
    )
    assert (grpo["temperature"], grpo["seed"], grpo["max_steps"]) == (config.generator.temperature, 7, 60)
    assert np.isclose(grpo["max_completion_length"], config.episode.max_response_tokens)
