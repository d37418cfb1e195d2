"""`spo trace`: what processes wrote of their time, as a trace that says the same."""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from common.log import Timeline
from launcher.cli import app
from launcher.trace import read_timelines
from sampler.process_metrics import SamplerTimeline


def a_run(folder: Path) -> None:
    rng = np.random.default_rng(0)
    learner, generator = Timeline(folder, "learner"), Timeline(folder, "generator-1")
    for step in range(20):
        learner.slice("wait", 1000.0 + step, 1000.25 + step, lane="step")
        learner.slice("train", 1000.25 + step, 1001.0 + step, lane="step", version=step)
        learner.instant("version", version=step)
    for number, start in enumerate(rng.uniform(1000, 1015, 200).tolist()):
        generator.slice("train", start, start + rng.uniform(0.01, 3), lane="episodes", task=f"t{number}")


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_no_two_slices_of_a_thread_overlap_and_none_is_lost(tmp_path: Path, name: str) -> None:
    a_run(tmp_path)
    path = tmp_path / name
    result = CliRunner().invoke(app, ["trace", str(tmp_path), "-o", str(path)])
    assert result.exit_code == 0, result.output
    events = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())[
        "traceEvents"
    ]
    slices = sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])
    threads = defaultdict(list)
    for event in slices:
        threads[event["pid"], event["tid"]].append(event)
    for of_thread in threads.values():
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(of_thread))
    assert len({event["args"]["task"] for event in slices if "task" in event["args"]}) == 200
    learner = [event for event in slices if "task" not in event["args"]]
    seconds = {
        name: sum(event["dur"] for event in learner if event["name"] == name) / 1e6 for name in ("wait", "train")
    }
    assert seconds == {"wait": pytest.approx(5), "train": pytest.approx(15)}
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {"learner", "generator-1"}
    assert sum(event["ph"] == "i" for event in events) == 20


def test_half_written_and_foreign_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    a_run(tmp_path)
    path = tmp_path / "timeline" / "learner.jsonl"
    path.write_bytes(path.read_bytes()[:-7])  # a kill
    Timeline(tmp_path, "learner").instant("version", version=99)
    with path.open("ab") as file:
        file.write(b"\n[1]\n\xff\n" + json.dumps({"name": "x", "start": 2, "end": 1}).encode())
    events, unreadable = read_timelines(tmp_path)
    assert unreadable == 4
    assert {"version": 99} in [event.details for event in events]
    result = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert result.exit_code == 0
    assert "4 lines" in result.output


def test_a_folder_without_timelines_is_refused_with_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        result = CliRunner().invoke(app, ["trace", str(folder)])
        assert str(folder) in str(result.exception)
        assert not (folder / "trace.json.gz").exists()


def test_a_timeline_keeps_the_newest_within_its_size(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, "learner", max_bytes=2000)

    def write(lane: str) -> None:
        for number in range(500):
            timeline.slice("train", number, number + 1, lane=lane)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # a thread is interrupted after nearly every step
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, ["a", "b", "c", "d"]))
    finally:
        sys.setswitchinterval(interval)
    files = list((tmp_path / "timeline").iterdir())
    assert sum(path.stat().st_size for path in files) < 4200
    kept = [json.loads(line) for path in files for line in path.read_text().split("\n") if line]
    assert len(kept) >= 20
    for lane in "abcd":
        starts = [fields["start"] for fields in kept if fields["lane"] == lane]
        assert sorted(starts) == list(range(500 - len(starts), 500))


def test_a_timeline_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "timeline").touch()
    Timeline(tmp_path, "learner").instant("version")
    Timeline(None, "learner").instant("version")
    assert read_timelines(tmp_path) == ([], 0)


def test_short_waits_for_the_same_are_one_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("sampler.process_metrics.time", SimpleNamespace(time=lambda: now, monotonic=lambda: now))
    timeline = SamplerTimeline(tmp_path)
    for cause, rounds in (("generators", 50), ("learner", 10), ("generators", 1)):
        for _ in range(rounds):
            now += 0.02
            timeline.waited(cause, 0.02)
    timeline.flush()
    waits = [(event.name, round((event.end or 0) - event.start, 3)) for event in read_timelines(tmp_path)[0]]
    assert waits == [("waits for generators", 1.0), ("waits for learner", 0.2)]
