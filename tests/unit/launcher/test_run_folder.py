"""What is read of a run folder while another process writes it, and whatever is damaged in it."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from common.errors import UserError
from launcher.folder import appended_lines
from launcher.folder.metrics import read_metrics
from launcher.folder.run_folder import RunFolder, find_runs
from tests.support.run_folder import write_metrics


def write_rewards(folder: Path, rewards: dict[int, float]) -> None:
    for version, reward in rewards.items():
        write_metrics(folder, version, {"reward/mean": reward})


def a_run(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("run:\n  name: mine\n  steps: 40\n")
    return path


def test_the_last_entry_of_a_version_counts_and_versions_ascend(tmp_path: Path) -> None:
    write_rewards(tmp_path, {1: 0.1, 2: 0.2, 3: 0.3})
    write_rewards(tmp_path, {2: 0.9})
    metrics = read_metrics(tmp_path)
    series = metrics.series("reward/mean")
    assert (series.versions.tolist(), series.values.tolist()) == ([1, 2, 3], [0.1, 0.9, 0.3])
    assert metrics.timeline("reward/mean").values.tolist() == [0.1, 0.2, 0.3, 0.9]


def test_each_process_has_its_own_series_and_the_sampler_comes_first(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1, {"reward/mean": 0.2}, "learner")
    write_rewards(tmp_path, {1: 0.1})
    for name in ("generator-10", "generator-2"):
        write_metrics(tmp_path, 1, {"generator/episodes": 3}, name)
    metrics = read_metrics(tmp_path)
    assert metrics.processes() == ["sampler", "learner", "generator-2", "generator-10"]
    assert metrics.series("reward/mean").values.tolist() == [0.1]
    assert metrics.series("reward/mean", "learner").values.tolist() == [0.2]
    assert metrics.series("reward/mean", "generator-2").values.tolist() == []
    assert metrics.names("generator-2") == ["generator/episodes"]


def test_an_update_reads_what_was_appended_and_leaves_half_a_line(tmp_path: Path) -> None:
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
    expected = [9] if how in ("emptied", "removed") else [7, 8, 9]
    assert metrics.series("reward/mean").versions.tolist() == expected


def test_damaged_lines_are_counted_and_the_others_read(tmp_path: Path) -> None:
    write_rewards(tmp_path, {1: 0.1})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n[1]\n{}\nnull\n\n" + b'{"time": "x", "version": 1, "process": "p", "values": {}}\n')
        values = b'{"reward/mean": "NaN", "a": [1], "b": 2}'
        file.write(b'{"time": 1, "version": 2, "process": "sampler", "values": ' + values + b"}\n")
    write_metrics(tmp_path, 3, {"reward/mean": 0.3}, histograms={"h": {"edges": [0, 1], "counts": [1, 2]}, "i": 3})
    metrics = read_metrics(tmp_path)
    assert metrics.unreadable == 6
    assert metrics.series("reward/mean").versions.tolist() == [1, 3]
    assert metrics.series("b").values.tolist() == [2]
    assert metrics.histogram("h") is None


def test_a_line_that_is_too_long_is_stepped_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appended_lines, "LONGEST", 200)
    write_rewards(tmp_path, {1: 0.1})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"x" * 5000)
    metrics = read_metrics(tmp_path)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"x" * 100 + b"\n")
    write_rewards(tmp_path, {2: 0.2})
    metrics.update()
    assert metrics.series("reward/mean").versions.tolist() == [1, 2]


def test_the_histogram_of_the_newest_version_is_kept(tmp_path: Path) -> None:
    for version in (1, 5, 3):
        write_metrics(tmp_path, version, {}, histograms={"h": {"edges": [0, 1, 2], "counts": [version, 1]}})
    histogram = read_metrics(tmp_path).histogram("h")
    assert histogram is not None
    assert (histogram.version, histogram.edges.tolist(), histogram.counts.tolist()) == (5, [0, 1, 2], [5, 1])


def test_runs_are_named_by_folder_configuration_or_the_folder_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run folder in runs/"):
        find_runs([])
    first, second = a_run(tmp_path / "runs/first"), a_run(tmp_path / "runs/second")
    assert [run.path for run in find_runs([first, second / "config.yaml"])] == [first, second]
    assert {run.name for run in find_runs([])} == {"first", "second"}
    runs = [a_run(tmp_path / "a/x/mine"), a_run(tmp_path / "b/x/mine"), a_run(tmp_path / "b/x/other")]
    assert [run.name for run in find_runs([*runs, runs[0]])] == ["a/x/mine", "b/x/mine", "other"]
    # A run that still makes its model can be watched.
    (tmp_path / "new/logs").mkdir(parents=True)
    assert [run.name for run in find_runs([tmp_path / "new"])] == ["new"]


def test_a_run_that_does_not_exist_is_refused_with_the_nearest(tmp_path: Path) -> None:
    a_run(tmp_path / "runs/quickstart-1")
    (tmp_path / "empty").mkdir()
    for path, words in (
        ("runs/quikstart-1", r"did you mean .*runs/quickstart-1\?"),
        ("runs/zzz", r"zzz does not exist; there are .*quickstart-1"),
        ("empty", "no run folder, nor does it hold one"),
    ):
        with pytest.raises(UserError, match=words):
            find_runs([tmp_path / path])


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\x00", b"[1, 2", b"- a\n- b\n", b"null", b'"text"', b"{" * 5000])
def test_damaged_files_read_as_nothing(tmp_path: Path, damage: bytes) -> None:
    run = RunFolder(a_run(tmp_path / "r"), "r")
    for name in ("config.yaml", "summary.json", "changes.jsonl", "chaos.json", "lock", "metrics.jsonl"):
        (run.path / name).write_bytes(damage + b"\n")
    metrics = read_metrics(run.path)
    assert (run.config(), run.changes(), run.summary(), run.audit()) == ({}, [], {}, [])
    assert (run.counters(metrics), run.steps(), run.state(metrics)) == ({}, None, "empty")


def test_configuration_changes_and_counters_are_read(tmp_path: Path) -> None:
    run = RunFolder(a_run(tmp_path / "r"), "r")
    (run.path / "changes.jsonl").write_text('{"step": 3, "key": "learner.lr", "from": 1, "to": 2, "time": 9}\n{"st')
    write_metrics(run.path, 3, {"samples/counted": 64.0, "samples/dispatched": 80.0, "samples/per_second": 2.5})
    assert run.steps() == 40
    assert [change["key"] for change in run.changes()] == ["learner.lr"]
    assert run.counters(read_metrics(run.path)) == {"counted": 64, "dispatched": 80}
    (run.path / "summary.json").write_text(json.dumps({"finished": True, "counters": {"counted": 70, "dead": 1}}))
    assert run.counters(read_metrics(run.path)) == {"counted": 70, "dispatched": 80, "dead": 1}


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
