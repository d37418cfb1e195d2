"""Run folders are read while another process writes them, and where files in them are damaged."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from common.errors import UserError
from launcher.folder import appended_lines
from launcher.folder.metrics import Metrics, read_metrics
from launcher.folder.run import read_one
from launcher.folder.run_folder import find_runs
from tests.support.run_folder import write_metrics


def write_rewards(folder: Path, rewards: dict[int, float]) -> None:
    for version, reward in rewards.items():
        write_metrics(folder, version, {"reward/mean": reward})


def versions(metrics: Metrics) -> list[int]:
    return metrics.series("reward/mean").versions.tolist()


def a_run(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("run:\n  name: mine\n  steps: 40\n")
    return path


def test_the_last_entry_of_each_process_and_version_counts(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1, {"reward/mean": 0.7}, "learner")
    write_rewards(tmp_path, {1: 0.1, 2: 0.2, 3: 0.3})
    write_rewards(tmp_path, {2: 0.9})
    for name in ("generator-10", "generator-2"):
        write_metrics(tmp_path, 1, {"generator/episodes": 3}, name)
    for version in (1, 5, 3):
        write_metrics(tmp_path, version, {}, histograms={"h": {"edges": [0, 1, 2], "counts": [version, 1]}})
    metrics = read_metrics(tmp_path)
    assert metrics.processes() == ["sampler", "learner", "generator-2", "generator-10"]
    assert metrics.names("generator-2") == ["generator/episodes"]
    assert versions(metrics) == [1, 2, 3]
    assert metrics.series("reward/mean").values.tolist() == [0.1, 0.9, 0.3], "the sampler comes first"
    assert metrics.timeline("reward/mean").values.tolist() == [0.1, 0.2, 0.3, 0.9]
    assert metrics.series("reward/mean", "learner").values.tolist() == [0.7]
    assert metrics.series("reward/mean", "generator-2").values.tolist() == []
    histogram = metrics.histogram("h")
    assert histogram is not None
    assert (histogram.version, histogram.edges.tolist(), histogram.counts.tolist()) == (5, [0, 1, 2], [5, 1])


def test_an_update_reads_whole_lines_alone(tmp_path: Path) -> None:
    write_rewards(tmp_path, {1: 0.1})
    metrics = read_metrics(tmp_path)
    assert not metrics.update()
    whole = '{"time": 1, "version": 2, "process": "sampler", "values": {"reward/mean": 0.2}}\n'
    for part, is_new in ((whole[:30], False), (whole[30:], True)):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(part)
        assert metrics.update() == is_new
    assert metrics.timeline("reward/mean").values.tolist() == [0.1, 0.2], "nothing was read twice"


@pytest.mark.parametrize("how", ["emptied", "removed", "replaced", "rewritten longer"])
def test_a_file_that_begins_again_takes_the_place_of_the_former(tmp_path: Path, how: str) -> None:
    write_rewards(tmp_path, {1: 0.1, 2: 0.2})
    metrics = read_metrics(tmp_path)
    path = tmp_path / "metrics.jsonl"
    if how == "emptied":
        os.truncate(path, 0)
        assert metrics.update()
        assert metrics.processes() == []
    elif how == "removed":
        path.unlink()
    elif how == "replaced":
        write_rewards(tmp_path / "new", {7: 0.5, 8: 0.5})
        os.replace(tmp_path / "new/metrics.jsonl", path)
    else:
        path.write_text("")
        write_rewards(tmp_path, {7: 0.5, 8: 0.5})
    write_rewards(tmp_path, {9: 0.9})
    assert metrics.update()
    assert versions(metrics) == ([9] if how in ("emptied", "removed") else [7, 8, 9])


def test_damaged_lines_are_counted_and_the_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rewards(tmp_path, {1: 0.1})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n[1]\n{}\nnull\n\n" + b'{"time": "x", "version": 1, "process": "p", "values": {}}\n')
        values = b'{"reward/mean": "NaN", "a": [1], "b": 2}'
        file.write(b'{"time": 1, "version": 2, "process": "sampler", "values": ' + values + b"}\n")
        for time, version in ((b"1e999", b"1"), (b"1", b"1" + b"0" * 30), (b"1", b"-1" + b"0" * 30)):
            file.write(b'{"time": %s, "version": %s, "process": "p", "values": {"b": 1}}\n' % (time, version))
    write_metrics(tmp_path, 3, {"reward/mean": 0.3}, histograms={"h": {"edges": [0, 1], "counts": [1, 2]}, "i": 3})
    metrics = read_metrics(tmp_path)
    assert metrics.unreadable == 9
    assert versions(metrics) == [1, 3]
    assert metrics.series("b").values.tolist() == [2]
    assert metrics.histogram("h") is None
    # A line that is too long is stepped over.
    monkeypatch.setattr(appended_lines, "LONGEST", 200)
    for part in (b"x" * 5000, b"x" * 100 + b"\n"):
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(part)
        metrics.update()
    write_rewards(tmp_path, {4: 0.4})
    metrics.update()
    assert versions(metrics) == [1, 3, 4]


def test_runs_are_named_by_folder_or_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run folder in runs/"):
        find_runs([])
    first, second = a_run(tmp_path / "runs/quickstart-1"), a_run(tmp_path / "runs/second")
    assert [run.path for run in find_runs([first, second / "config.yaml"])] == [first, second]
    assert {run.name for run in find_runs([])} == {"quickstart-1", "second"}
    runs = [a_run(tmp_path / "a/x/mine"), a_run(tmp_path / "b/x/mine"), a_run(tmp_path / "b/x/other")]
    assert [run.name for run in find_runs([*runs, runs[0]])] == ["a/x/mine", "b/x/mine", "other"]
    # A run that still makes its model can be watched.
    (tmp_path / "new/logs").mkdir(parents=True)
    assert [run.name for run in find_runs([tmp_path / "new"])] == ["new"]
    (tmp_path / "empty").mkdir()
    for path, words in (
        ("runs/quikstart-1", r"did you mean .*runs/quickstart-1\?"),
        ("runs/zzz", r"zzz does not exist; there are .*quickstart-1"),
        ("empty", "not a run folder and holds none"),
    ):
        with pytest.raises(UserError, match=words):
            find_runs([tmp_path / path])


def test_damaged_files_read_as_nothing(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "r")
    for damage in (b"", b"\xff\xfe\x00", b"[1, 2", b"- a\n- b\n", b"null", b'"text"', b"{" * 5000):
        for name in ("config.yaml", "summary.json", "changes.jsonl", "chaos.json", "lock", "metrics.jsonl"):
            (folder / name).write_bytes(damage + b"\n")
        run = read_one(folder)
        assert (run.config, run.folder.changes(), run.folder.summary(), run.folder.audit()) == ({}, [], {}, [])
        assert (run.counters, run.steps, run.state) == ({}, None, "empty")


def test_aliases_that_stand_for_too_much_read_as_nothing(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "r")
    shared = "run: {steps: 6}\nlearner: &own {lr: 1.0e-5}\nother: {<<: *own, also: *own}\n"
    (folder / "config.yaml").write_text(shared)
    assert read_one(folder).config["other"] == {"lr": 1e-5, "also": {"lr": 1e-5}}
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(6))
    for damage in (bomb, "run: &own [*own]\n", "run: &own {steps: *own}\n"):
        (folder / "config.yaml").write_text(damage)
        assert read_one(folder).config == {}


def test_state_and_counters_follow_what_a_run_writes(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "r")
    run = read_one(folder)
    assert (run.steps, run.state) == (40, "empty")
    (folder / "changes.jsonl").write_text('{"step": 3, "key": "learner.lr", "from": 1, "to": 2, "time": 9}\n{"st')
    assert [change["key"] for change in run.folder.changes()] == ["learner.lr"]
    counters = {"samples/counted": 64.0, "samples/dispatched": 80.0, "samples/per_second": 2.5}
    write_metrics(folder, 1, counters, time=time.time() - 3600)
    run.update_metrics()
    assert (run.state, run.counters) == ("stopped", {"counted": 64, "dispatched": 80})
    (folder / "lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": "today"}))
    assert run.state == "running"
    (folder / "summary.json").write_text(json.dumps({"finished": True, "counters": {"counted": 70, "dead": 1}}))
    assert (run.state, run.counters) == ("finished", {"counted": 70, "dispatched": 80, "dead": 1})
    # Extended: what it writes is newer than the summary of its first end.
    write_metrics(folder, 2, {"reward/mean": 0.5}, time=time.time() + 60)
    run.update_metrics()
    assert run.state == "running"
