from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from common.errors import UserError
from launcher.folder.metrics import read_metrics
from launcher.folder.processes import process_states
from launcher.folder.run_folder import RunFolder, find_runs
from tests.support.run_folders import write_metrics


def a_run(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("run:\n  name: mine\n  steps: 40\n")
    return path


def test_runs_are_named_by_folder_by_configuration_or_by_the_folder_above(tmp_path: Path) -> None:
    first, second = a_run(tmp_path / "runs/first"), a_run(tmp_path / "runs/second")

    assert [run.path for run in find_runs([first, second / "config.yaml"])] == [first, second]
    assert {run.name for run in find_runs([tmp_path / "runs"])} == {"first", "second"}


def test_two_runs_of_the_same_name_are_told_apart_by_the_folders_above(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "a/x/mine"), a_run(tmp_path / "b/x/mine"), a_run(tmp_path / "b/x/other")]

    assert [run.name for run in find_runs([*runs, runs[0]])] == ["a/x/mine", "b/x/mine", "other"]


def test_without_arguments_the_runs_of_runs_are_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run folder in runs/"):
        find_runs([])
    a_run(tmp_path / "runs/first")

    assert [run.name for run in find_runs([])] == ["first"]


def test_a_run_that_does_not_exist_is_refused_with_the_nearest(tmp_path: Path) -> None:
    a_run(tmp_path / "runs/quickstart-1")

    with pytest.raises(UserError, match=r"did you mean .*runs/quickstart-1\?"):
        find_runs([tmp_path / "runs/quikstart-1"])
    with pytest.raises(UserError, match=r"zzz does not exist; there are .*quickstart-1"):
        find_runs([tmp_path / "runs/zzz"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no run folder, nor does it hold one"):
        find_runs([tmp_path / "empty"])


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\x00", b"[1, 2", b"- a\n- b\n", b"null", b'"text"', b"{" * 5000])
def test_damaged_files_read_as_nothing(tmp_path: Path, damage: bytes) -> None:
    run = RunFolder(a_run(tmp_path / "r"), "r")
    for name in ("config.yaml", "summary.json", "changes.jsonl", "lock", "metrics.jsonl"):
        (run.path / name).write_bytes(damage + b"\n")
    metrics = read_metrics(run.path)

    assert run.config() == {}
    assert run.changes() == []
    assert run.summary() == {}
    assert run.books(metrics) == {}
    assert run.steps() is None
    assert run.state(metrics) == "stopped"
    assert process_states(metrics) == []


def test_configuration_changes_and_books_are_read(tmp_path: Path) -> None:
    run = RunFolder(a_run(tmp_path / "r"), "r")
    (run.path / "changes.jsonl").write_text('{"step": 3, "key": "learner.lr", "from": 1, "to": 2, "time": 9}\n{"st')
    write_metrics(run.path, 3, {"samples/counted": 64.0, "samples/dispatched": 80.0, "samples/per_second": 2.5})

    assert run.steps() == 40
    assert [change["key"] for change in run.changes()] == ["learner.lr"]
    assert run.books(read_metrics(run.path)) == {"counted": 64, "dispatched": 80}
    (run.path / "summary.json").write_text(json.dumps({"finished": True, "counters": {"counted": 70, "dead": 1}}))
    assert run.books(read_metrics(run.path)) == {"counted": 70, "dispatched": 80, "dead": 1}


def test_the_state_of_a_run_follows_what_it_writes(tmp_path: Path) -> None:
    run = RunFolder(a_run(tmp_path / "r"), "r")
    assert run.state(read_metrics(run.path)) == "empty"

    write_metrics(run.path, 1, {"reward/mean": 0.5}, time=time.time() - 3600)
    assert run.state(read_metrics(run.path)) == "stopped"
    lock = {"pid": os.getpid(), "host": socket.gethostname(), "since": "today"}
    (run.path / "lock").write_text(json.dumps(lock))
    assert run.state(read_metrics(run.path)) == "going on"
    (run.path / "summary.json").write_text('{"finished": true}')
    assert run.state(read_metrics(run.path)) == "finished"

    # Extended: what it writes is newer than the summary of its first end.
    write_metrics(run.path, 2, {"reward/mean": 0.5}, time=time.time() + 60)
    assert run.state(read_metrics(run.path)) == "going on"


def test_processes_are_shown_with_what_they_published_last(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1, {"generator/tokens_per_second": 10.0}, process="generator-1", time=100.0)
    write_metrics(tmp_path, 2, {"generator/tokens_per_second": 20.0}, process="generator-1", time=110.0)
    write_metrics(tmp_path, 1, {"reward/mean": 0.5}, time=105.0)

    sampler, generator = process_states(read_metrics(tmp_path))

    assert (sampler.name, sampler.values) == ("sampler", {})
    assert (generator.name, generator.time, generator.version) == ("generator-1", 110.0, 2)
    assert generator.values == {"generator/tokens_per_second": 20.0}


def test_a_run_that_still_makes_its_model_can_be_watched(tmp_path: Path) -> None:
    (tmp_path / "new/logs").mkdir(parents=True)
    assert [run.name for run in find_runs([tmp_path / "new"])] == ["new"]
