"""Where the time of a run went: its bottleneck, on made timelines whose answers are known, and `spo trace`."""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from common.errors import UserError
from common.log import Timeline
from launcher.cli import app
from launcher.folder.metrics import Metrics, Series, read_metrics
from launcher.folder.run import read_one
from launcher.folder.time_budget import (
    Bottleneck,
    GeneratorTime,
    Pace,
    Split,
    accumulated,
    bottleneck,
    generator_times,
    learner_seconds,
    moved_gpus,
    total_seconds,
)
from launcher.trace import read_timelines
from sampler.process_metrics import SamplerTimeline
from tests.support.run_folder import finished_run, write_metrics

Steps = list[tuple[float, float]]  # of each step, the seconds that the learner waited and worked
Spans = list[tuple[float, float]]


def write_learner(folder: Path, steps: Steps, restarts: Sequence[float] = ()) -> None:
    """Steps one after the other from second 0 on, and the processor time of a learner that was restarted."""
    for version, end in enumerate(accumulate(map(sum, steps)), 1):
        wait, work = steps[version - 1]
        write_metrics(folder, version, {"seconds/wait": wait, "seconds/train": work}, "learner", end)
    for time in (1.0, *restarts):
        for used in (1.0, 50.0):
            write_metrics(folder, 0, {"process/cpu_seconds": used}, "learner", time + used / 100)


def write_generator(folder: Path, idle: Spans, life: tuple[float, float], every: float = 5.0, name: int = 1) -> None:
    """The counters of a generator that lives between two times and has no task in the spans of `idle`."""
    start, end = life
    for time in (*np.arange(start + 1.0, end, every).tolist(), end):
        waited = sum(max(0.0, min(time, last) - max(start, first)) for first, last in idle)
        counters = {"generator/seconds": time - start, "generator/waiting_for_tasks_seconds": waited}
        write_metrics(folder, 0, counters, f"generator-{name}", time)


def each(seconds: float, share: float, start: float, end: float) -> Spans:
    """The end of each span of some seconds between two times."""
    return [(at + seconds * (1 - share), at + seconds) for at in np.arange(start, end, seconds).tolist()]


def slowest(
    folder: Path, steps: Steps, idle: Spans, life: tuple[float, float], restarts: Sequence[float] = (), **more: float
) -> Bottleneck:
    """What is found with a learner of these steps, and one generator more."""
    write_learner(folder, steps, restarts)
    write_generator(folder, idle, life, **more)
    found = bottleneck(read_metrics(folder))
    assert found is not None
    return found


def test_the_engines_start_is_no_wait_for_the_generators(tmp_path: Path) -> None:
    slow = slowest(tmp_path, [(300, 1), *[(0.0, 10.0)] * 8], each(10, 0.6, 301, 381), (290, 381))
    assert (slow.side, slow.steps, slow.wait, slow.idle) == ("learner", 8, 0.0, pytest.approx(0.6))
    assert "over the last 8 steps the learner waited 0% of its time for a batch, and the generators 60%" in slow.words


def test_the_answer_stays_once_the_run_is_over(tmp_path: Path) -> None:
    live = slowest(tmp_path, [(20, 5), *[(4.0, 6.0)] * 10], [], (0, 125))
    write_generator(tmp_path, [(125, 900)], (0, 900))
    over = bottleneck(read_metrics(tmp_path))
    assert (live.side, over and over.side, live.words) == ("generators", "generators", over and over.words)


def test_fast_steps_are_compared_over_a_minute(tmp_path: Path) -> None:
    slow = slowest(tmp_path, [(10, 0.1), *[(0.01, 0.09)] * 700], [(10, 79)], (0, 300), every=30)
    assert slow.side == "learner"
    assert 600 <= slow.steps <= 602
    assert slow.idle > 0.8


def test_another_start_of_the_learner_is_none_either(tmp_path: Path) -> None:
    steps = [(20, 5), *[(4.0, 6.0)] * 10, (200, 5), *[(0.5, 9.5)] * 6]
    slow = slowest(tmp_path, steps, each(10, 0.5, 330, 390), (0, 390), restarts=[200])
    assert (slow.side, slow.steps, slow.wait) == ("learner", 6, pytest.approx(0.05))


def test_a_generator_counts_by_its_time(tmp_path: Path) -> None:
    write_generator(tmp_path, [], (0, 125), name=2)
    slow = slowest(tmp_path, [(20, 5), *[(3.0, 7.0)] * 10], [(115, 125)], (115, 125))
    assert (slow.side, slow.wait) == ("generators", pytest.approx(0.3))
    assert slow.idle == pytest.approx(10 / 110, abs=0.01)


@pytest.mark.parametrize(
    ("wait", "idle", "words"),
    [(5.0, 0.0, "generators are the bottleneck"), (0.2, 0.7, "learner is the bottleneck"),
     (4.0, 0.4, "wait for each other"), (0.1, 0.05, "Neither side waits for long")],
)  # fmt: skip
def test_the_bottleneck_is_what_the_others_waited_for_lately(
    tmp_path: Path, wait: float, idle: float, words: str
) -> None:
    # The first twenty steps were quite different.
    steps = [*[(9.0, 1.0)] * 20, *[(wait, 10.0 - wait)] * 20]
    spans = [*each(10, 0.9, 0, 200), *each(10, idle, 200, 400)]
    slow = slowest(tmp_path, steps, spans, (0, 400))
    assert (words in slow.words, slow.steps) == (True, 20)
    assert (slow.wait, slow.idle) == (pytest.approx(wait / 10), pytest.approx(idle, abs=0.02))


@pytest.mark.parametrize(("share", "is_advised"), [(0.0, True), (0.2, True), (0.6, False)])
def test_more_staleness_is_not_advised_where_samples_are_masked(tmp_path: Path, share: float, is_advised: bool) -> None:
    for version in range(1, 21):
        write_metrics(tmp_path, version, {"rollout_corr/masked_fraction": share}, "learner", version * 10.0)
    slow = slowest(tmp_path, [(4.0, 6.0)] * 20, each(10, 0.4, 0, 200), (0, 200))
    assert slow.side == "both"
    assert ("A larger sampler.max_staleness" in slow.words) == is_advised


@pytest.mark.parametrize(("wait", "scoring", "side"), [(4.0, 30, "teachers"), (4.0, 10, "both"), (0.1, 30, "learner")])
def test_teachers_are_named_where_the_episodes_wait_for_them(
    tmp_path: Path, wait: float, scoring: int, side: str
) -> None:
    for at in range(5, 245, 5):
        waiting = 0 if at < 40 else scoring  # those of the first steps do not count
        slots = {"generator/awaiting_scores": waiting, "generator/slots": 40 - waiting}
        write_metrics(tmp_path, 0, slots, "generator-1", at)
    slow = slowest(tmp_path, [(wait, 10.0 - wait)] * 24, each(10, 0.4, 0, 240), (0, 240))
    assert (slow.side, slow.scoring) == (side, scoring / 40)
    assert ("The teachers are the bottleneck" in slow.words) == (side == "teachers")


def test_nothing_is_said_before_both_were_measured(tmp_path: Path) -> None:
    write_generator(tmp_path / "alone", [], (0, 100))
    write_learner(tmp_path / "early", [(300, 1), (0, 1)])
    write_generator(tmp_path / "early", [], (290, 310))
    write_learner(tmp_path / "learner", [(1, 1)] * 30)
    assert [bottleneck(read_metrics(tmp_path / name)) for name in ("alone", "early", "learner", "none")] == [None] * 4


def test_a_reader_of_the_newest_values_gives_the_same_answer(tmp_path: Path) -> None:
    write_learner(tmp_path, [(20, 5), *[(4.0, 6.0)] * 200])
    write_generator(tmp_path, [], (0, 2025))
    kept = Metrics(tmp_path, newest=64)
    kept.update()
    assert bottleneck(kept) == bottleneck(read_metrics(tmp_path)) is not None
    assert 64 <= len(kept.timeline("generator/seconds").values) < 128


def test_time_is_divided_as_the_processes_measured_it(tmp_path: Path) -> None:
    run = read_one(finished_run(tmp_path / "mine"))
    assert learner_seconds(run.metrics) == {"waiting for a batch": 12.0, "training": 48.0}
    assert generator_times(run.metrics) == [GeneratorTime("generator-1", 60.0, 0.5, 0.0)]
    assert run.phases() == {"engine start": 10.0, "training": 50.0}
    assert total_seconds(run.metrics, run.phases()) == 60.0
    # Counts begin again with each start.
    counts = Series(np.arange(7), np.arange(7.0), np.array([0.0, 5.0, 9.0, 1.0, 4.0, math.nan, 2.0]))
    assert accumulated(counts) == 9 + 4 + 2
    assert accumulated(counts, begin=1.0) == 4 + 4 + 2
    assert accumulated(Series(np.empty(0, int), np.empty(0), np.empty(0))) == 0


@pytest.mark.parametrize(
    ("wait", "idle", "split", "words"),
    [
        # The generators work 100 s of a step, the learner 40 s of it; 4 + 4 becomes 3 + 5.
        (0.6, 0.0, Split(4, 4), "moving one GPU from learner to generators would make a step take 80 s instead of 100"),
        (0.0, 0.6, Split(4, 4), "moving one GPU from generators to learner would make a step take 80 s instead of 100"),
        # 2 + 6: then the learner takes 80 s itself.
        (0.6, 0.0, Split(4, 4, unit=2), "moving 2 GPUs from learner to generators would make a step take 80 s instead"),
        (0.0, 0.0, Split(4, 4), "moving one GPU either way would make no step shorter"),
        (0.4, 0.0, Split(2, 2), "moving one GPU either way would make no step shorter"),
        (0.6, 0.0, Split(1, 1), None),
        (0.6, 0.0, Split(2, 2, unit=2), None),
    ],
)
def test_what_a_moved_gpu_would_bring_follows_from_the_measured_times(
    wait: float, idle: float, split: Split, words: str | None
) -> None:
    said = moved_gpus(Bottleneck("either", 20, wait, idle, "", seconds=100.0), split)
    assert said == words if words is None else said is not None and said.startswith(words)
    assert moved_gpus(Bottleneck("either", 19, wait, idle, "", seconds=100.0), split) is None


SLOW_THEN_FAST = [(100.0 * version, version) for version in range(5)]
SLOW_THEN_FAST += [(400.0 + version, 4 + version) for version in range(1, 31)]
BACK = [(0.0, 7), (1.0, 8), (2.0, 9), (30.0, 5)]  # a learner that resumed from its checkpoint


@pytest.mark.parametrize(
    ("seen", "steps", "now", "left"),
    [
        ([], 10, 0.0, None), ([(5.0, 1)], 10, 6.0, None), ([(5.0, 1), (9.0, 3)], 10, 9.0, 14.0),
        ([(5.0, 1), (9.0, 3)], 10, 12.0, 11.0), ([(5.0, 1), (6.0, 2)], 3, 60.0, 0.0),
        (SLOW_THEN_FAST, 44, 430.0, 10.0), (BACK, 10, 30.0, None), ([*BACK, (31.0, 6)], 10, 31.0, 4.0),
    ],
)  # fmt: skip
def test_the_newest_steps_say_how_long_the_rest_takes(
    seen: list[tuple[float, int]], steps: int, now: float, left: float | None
) -> None:
    pace = Pace()
    for at, version in seen:
        pace.see(version, at)
    assert pace.left(steps, now) == left


# `spo trace`: what processes wrote of their time, as a trace that says the same.


def write_timelines(folder: Path) -> None:
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
    write_timelines(tmp_path)
    spans = [("NaN", "1"), ("1", "NaN"), ("1", "Infinity"), ("2", "1")]
    lines = [f'{{"name": "train", "start": {start}, "end": {end}}}\n' for start, end in spans]
    (tmp_path / "timeline/sampler.jsonl").write_text("".join(lines))
    path = tmp_path / name
    result = CliRunner().invoke(app, ["trace", str(tmp_path), "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert "4 lines" in result.output
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
    write_timelines(tmp_path)
    path = tmp_path / "timeline" / "learner.jsonl"
    path.write_bytes(path.read_bytes()[:-7])  # a kill
    Timeline(tmp_path, "learner").instant("version", version=99)
    with path.open("ab") as file:
        file.write(b"\n[1]\n\xff\n" + json.dumps({"name": "x", "start": 2, "end": 1}).encode())
        # Times that no clock has shown, and brackets too deep to be read.
        times = ({"start": 10**400}, {"start": 1, "end": 10**400}, {"start": -1e308}, {"start": 1, "end": 1e308})
        file.writelines(b"\n" + json.dumps({"name": "x", **time}).encode() for time in times)
        file.write(b"\n" + b"[" * 100_000)
    events, unreadable = read_timelines(tmp_path)
    assert unreadable == 9
    assert {"version": 99} in [event.details for event in events]
    result = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert result.exit_code == 0
    assert "9 lines" in result.output
    (tmp_path / "timeline" / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match="folder.jsonl cannot be read: Is a directory"):
        read_timelines(tmp_path)


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
