"""Run folders: read while they are written, and where files in them are damaged; and compared with one another."""

from __future__ import annotations

import datetime
import errno
import itertools
import json
import math
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from launcher.compare import Comparison, compared, comparison_panel
from launcher.folder import appended_lines
from launcher.folder.metrics import Metrics, read_metrics
from launcher.folder.run import Run, read_one
from launcher.folder.run_folder import find_runs
from launcher.folder.statistics import Curve, bootstrap, over_runs, smoothed
from launcher.page.panels.configuration import configuration_panel
from tests.support import run_folder as folders
from tests.support.run_folder import add_evaluation, finished_run, make_run, write_metrics
from tests.support.spo_command import Spo


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
    for edges, counts in (
        ([0, math.inf], [1]), ([0, math.nan, 2], [1, 1]), ([2, 1, 0], [1, 1]), ([0, 0], [1]), ([10**400, 1], [1]),
        ([-1e308, 1e308], [1]), ([0, 1], [-1]), ([0, 1], [math.inf]),
    ):  # fmt: skip
        damaged = {"h": {"edges": edges, "counts": counts}}
        write_metrics(tmp_path / "drawn", 3, {}, histograms=damaged)
        assert read_metrics(tmp_path / "drawn").histogram("h") is None, damaged
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
    # A folder of another user is passed over.
    stat = os.stat
    a_run(tmp_path / "runs/closed")

    def closed(path: Any, **options: Any) -> os.stat_result:
        if "closed/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    with monkeypatch.context() as other:
        other.setattr(os, "stat", closed)
        assert {run.name for run in find_runs([])} == {"quickstart-1", "second"}
        with pytest.raises(UserError, match=r"did you mean .*second"):
            find_runs([Path("runs/secon")])
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


def test_folders_of_other_accounts_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = a_run(tmp_path / "runs/own"), a_run(tmp_path / "runs/other")
    (tmp_path / "runs/link").mkdir()
    stat, listdir = os.stat, os.listdir

    def refusing(path: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(path, Path | str) and (str(other) in f"{Path(path).parent}/" or Path(path).name == "link"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *rest, **named)

    def refusing_list(path: Any = ".") -> list[str]:
        if str(path) == str(other):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listdir(path)

    monkeypatch.setattr(os, "stat", refusing)
    monkeypatch.setattr(os, "listdir", refusing_list)
    assert [run.path for run in find_runs([tmp_path / "runs"])] == [own]
    with pytest.raises(UserError, match="other cannot be read: Permission denied"):
        find_runs([other])
    with pytest.raises(UserError, match="cannot be read: File name too long"):
        find_runs([tmp_path / ("x" * 300)])


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
    summary = {"finished": True, "steps": None, "counters": {"counted": 70, "dead": 1}}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert (run.state, run.counters) == ("finished", {"counted": 70, "dispatched": 80, "dead": 1})
    # Extended: what it writes is newer than the summary of its first end.
    write_metrics(folder, 2, {"reward/mean": 0.5}, time=time.time() + 60)
    run.update_metrics()
    assert run.state == "running"


# `spo compare`: which runs are one line, what differs, figures and bands by hand, and the page of all of them.


def seeds(tmp_path: Path, gains: dict[str, float], **sections: Any) -> list[Run]:
    """Runs named by the keys, of seeds 0, 1, ...; each has its data in its own folder, as quickstarts do."""
    runs = []
    for seed, (name, gain) in enumerate(gains.items()):
        data = {"data": {"train": str(tmp_path / name / "train.jsonl")}}
        runs.append(read_one(finished_run(tmp_path / name, seed=seed, gain=gain, **data, **sections)))
    return runs


def labels(comparison: Comparison) -> list[tuple[str, int]]:
    return [(line.label, len(line.runs)) for line in comparison.lines]


def test_runs_that_differ_only_in_their_seed_are_one_line(tmp_path: Path) -> None:
    runs = seeds(tmp_path, {"a": 0.1, "b": 0.05, "c": 0.12})
    comparison = compared(runs, [], None)
    (line,) = comparison.lines
    assert (len(line.runs), comparison.differing, comparison.warnings) == (3, {}, [])
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


def test_runs_are_compared_whatever_the_keys_of_their_options(tmp_path: Path) -> None:
    runs = seeds(tmp_path, {"a": 0.1, "b": 0.1})
    for run in runs:
        options = {"mine": {1: "a", "b": {datetime.date(2026, 1, 1): 2}}}
        folders.change_config(run.folder.path, episode={"reward_options": options})
    (line,) = compared([read_one(run.folder.path) for run in runs], [], None).lines
    assert len(line.runs) == 2
    panels = json.dumps(configuration_panel(read_one(runs[0].folder.path)))
    assert "2026-01-01" in panels


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
    folders.change_config(mine, learner={"forgotten": 3}, without=("learner.lr", "run.deterministic"))
    empty = make_run(tmp_path / "empty")
    folders.add_summary(empty, finished=False, steps=0)
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
    page = folders.SavedPage(tmp_path / "compared.html")
    assert page.data["comparison"]["title"] == "4 runs compared"
    assert {row[-1] for row in page.charts["runs-compared"]["rows"]} == {"both"}
    assert len(re.findall(r"\bboth\b", ran.stdout)) == 4
    differing = {row[0]: row[1:] for row in page.charts["what-differs"]["rows"]}
    # The newest run folder comes first.
    assert sorted(differing["learner.lr"]) == ["0.0003", "1e-06"]
    assert min(differing["data.system_prompt"]) == "<script>alert(1)</script>\\x1b[31m"
    assert len(page.data["runs"]) == len(page.data["panels"]) == 4


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
