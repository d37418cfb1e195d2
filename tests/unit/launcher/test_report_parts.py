"""What a report says of a run folder: its learning, configuration, time and books, and of what is missing there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import UserError
from launcher.folder.series import Series
from launcher.folder.version_table import version_table
from launcher.report.books import balances
from launcher.report.curves import learner_rate
from launcher.report.evaluations import improvement, read_evaluations
from launcher.report.pairs import pairs
from launcher.report.run_data import read_run
from launcher.report.settings import differing
from launcher.report.time_budget import GeneratorTime, Part, accumulated, bottleneck, time_budget
from tests.support.run_folder import COUNTERS, add_evaluation, add_metrics, change_config, finished_run, make_run


def read(folder: Path) -> Any:
    return read_run(folder, ask_redis=False)


def test_improvement_is_of_the_prompts_that_both_versions_answered(tmp_path: Path) -> None:
    add_evaluation(tmp_path, 0, {"a": [0, 1], "b": [0, 0], "gone": [1]})
    add_evaluation(tmp_path, 10, {"b": [1, 1], "a": [0, 0], "new": [0]})
    change = improvement(read_evaluations(tmp_path), 1.0)
    assert change is not None
    assert (change.first, change.last, change.prompts, change.better, change.worse) == (0, 10, 2, 1, 1)
    assert (change.before.mean, change.after.mean, change.change.mean) == (0.25, 0.5, 0.25)
    assert (change.change.low, change.change.high) == (-0.5, 1.0)


def test_what_was_set_aside_is_no_wrong_answer(tmp_path: Path) -> None:
    add_evaluation(tmp_path, 0, {"a": [1.0]})
    path = tmp_path / "validation_data" / "0.jsonl"
    row = json.loads(path.read_text())
    path.write_text(path.read_text() + json.dumps(row | {"prompt_id": "b", "status": "set_aside"}) + "\n")
    assert read_evaluations(tmp_path)[0].accuracies(1.0) == {"a": 1.0}


def test_prompts_are_chosen_by_how_much_their_mean_reward_changed(tmp_path: Path) -> None:
    add_evaluation(tmp_path, 0, {"d": [0, 0], "c": [0, 0], "b": [1, 0], "a": [1, 1], "e": [1, 1]})
    add_evaluation(tmp_path, 5, {"d": [1, 1], "c": [1, 1], "b": [1, 1], "a": [0, 1], "e": [1, 1]})
    chosen = pairs(*read_evaluations(tmp_path), count=3)
    assert [pair.prompt_id for pair in chosen.improved] == ["c", "d", "b"]
    assert [pair.prompt_id for pair in chosen.worse] == ["a"]
    worse = chosen.worse[0]
    assert [turn.text for turn in worse.prompt] == ["question a"]
    # Of the responses with rewards 0 and 1 both are as near to their mean: the first.
    assert (worse.after.reward, worse.after.mean_reward, worse.after.turns[0].text) == (
        0.0,
        0.5,
        "answer 0 of version 5",
    )


def test_the_configuration_is_compared_with_the_defaults_and_told_from_the_run_folder(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine", learner={"lr": 3e-4}, data={"train": str(tmp_path / "mine" / "in.jsonl")})
    change_config(folder, learner={"gone": 5})
    changed = differing(read(folder).values)
    assert changed["learner.lr"][0] == 3e-4
    assert changed["learner.gone"][0] == 5
    assert changed["data.train"][0] == "RUN/in.jsonl"
    assert {key.split(".")[0] for key in changed} == {"run", "model", "data", "learner"}
    assert "run.name" not in changed


@pytest.mark.parametrize("broken", ["summary.json", "metrics.jsonl", "validation_data/6.jsonl", "versions.jsonl"])
@pytest.mark.parametrize("text", [b"", b'{"half', b"[1, 2]\n", b"\xff\xfe\n\n", None])
def test_a_file_that_is_missing_emptied_or_half_written_takes_away_what_it_had_and_no_more(
    tmp_path: Path, broken: str, text: bytes | None
) -> None:
    folder = finished_run(tmp_path / "mine")
    (folder / broken).unlink() if text is None else (folder / broken).write_bytes(text)
    run = read(folder)
    assert run.values["run.name"] == "mine"
    assert run.state == ("finished" if broken != "summary.json" else "not finished: stopped at step 6 of 6")
    assert len(run.evaluations) == (2 if broken.startswith("validation") else 3)
    assert bool(run.versions) == (broken != "versions.jsonl")
    assert time_budget(run).bottleneck


@pytest.mark.parametrize("text", ["", "just words", "{", "- a list", None])
def test_without_a_readable_configuration_the_rest_is_shown_with_a_note(tmp_path: Path, text: str | None) -> None:
    folder = finished_run(tmp_path / "mine")
    (folder / "config.yaml").unlink() if text is None else (folder / "config.yaml").write_text(text)
    run = read(folder)
    assert (run.values, run.notes) == ({}, ["its config.yaml is missing or cannot be read"])
    assert (run.state, len(run.evaluations)) == ("finished", 3)


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path / "none")
    with pytest.raises(UserError, match="is no run folder"):
        read(tmp_path)
    for name in ("one", "two"):
        make_run(tmp_path / name)
    with pytest.raises(UserError, match="holds 2 runs: name one of them"):
        read(tmp_path)


def test_a_summary_of_an_earlier_start_is_not_that_of_the_run(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "mine")
    add_metrics(folder, 7, "learner", seconds__train=0.5)
    change_config(folder, run={"steps": 20})
    assert read(folder).state == "not finished: stopped at step 7 of 20"


def test_counts_that_begin_anew_with_each_start_add_up() -> None:
    counts = np.array([0.0, 5.0, 9.0, 1.0, 4.0, math.nan, 2.0])
    assert accumulated(Series(np.arange(7), np.arange(7.0), counts)) == 9 + 4 + 2
    assert accumulated(Series(np.empty(0, int), np.empty(0), np.empty(0))) == 0


def test_time_is_divided_as_the_processes_measured_it(tmp_path: Path) -> None:
    budget = time_budget(read(finished_run(tmp_path / "mine")))
    assert [(part.name, part.seconds, part.share) for part in budget.learner] == [
        ("waiting for a batch", 12.0, pytest.approx(0.2)),
        ("training", 48.0, pytest.approx(0.8)),
    ]
    assert budget.generators == [GeneratorTime("generator-1", 60.0, pytest.approx(0.5), 0.0)]
    assert [part.name for part in budget.phases] == ["engine start", "training"]
    assert budget.total == 60.0


@pytest.mark.parametrize(
    ("waits", "idle", "words"),
    [(0.5, 0.0, "generators were the bottleneck"), (0.02, 0.7, "learner was the bottleneck"),
     (0.4, 0.4, "waited for each other"), (0.01, 0.05, "No side"), (None, 0.5, "Not known")],
)  # fmt: skip
def test_the_bottleneck_is_whom_the_other_waits_for(waits: float | None, idle: float, words: str) -> None:
    learner = [] if waits is None else [Part("waiting for a batch", 1.0, waits)]
    assert words in bottleneck(learner, [GeneratorTime("generator-1", 10.0, idle, None)])


def test_the_books_balance_where_all_that_was_dispatched_was_counted() -> None:
    assert [balance.holds for balance in balances(COUNTERS, is_over=True)] == [True, True, True]
    lost = COUNTERS | {"counted": 59}
    assert [balance.holds for balance in balances(lost, is_over=True)] == [False, False, True]
    assert [balance.holds for balance in balances(lost, is_over=False)] == [None, None, None]
    assert balances(COUNTERS | {"batched": 50}, is_over=True)[2].holds is False
    assert balances({}, is_over=True) == []


def test_versions_have_a_column_a_process_and_show_what_a_later_start_changed() -> None:
    lines = [
        {"process": "sampler", "python": "3.11.7", "packages": {"redis": "8.0.0"}},
        {"process": "learner", "python": "3.11.7", "packages": {"torch": "2.13.0"}},
        {"process": "sampler", "python": "3.11.7", "packages": {"redis": "8.1.0"}},
        {"process": "generator-1", "python": "3.11.7", "packages": {"torch": "2.13.0"}},
        {"process": "generator-2", "packages": "nonsense"},
    ]
    table = version_table(lines)
    assert table["processes"] == ["sampler", "learner, generator-1", "generator-2"]
    assert table["rows"]["redis"] == ["8.0.0, then 8.1.0", "–", "–"]
    assert table["rows"]["torch"] == ["–", "2.13.0", "–"]


def test_the_learner_s_rate_is_by_the_whole_time_of_its_steps(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")
    for version, wait in ((1, 6.0), (2, 0.0), (4, 14.0)):
        add_metrics(folder, version, "learner", tokens__total=40.0, seconds__wait=wait, seconds__train=2.0)
    add_metrics(folder, 4, "learner", seconds__checkpoint=4.0)
    add_metrics(folder, 5, "learner", seconds__checkpoint=4.0)
    rate = learner_rate(read(folder).metrics)
    assert (rate.versions.tolist(), rate.values.tolist()) == ([1, 2, 4], [40 / 8, 80 / 10, 120 / 30])
