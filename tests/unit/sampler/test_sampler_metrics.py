"""What a run measures: `metrics.jsonl`, figures of batches and processes, the audit of values, and TensorBoard."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import structlog
from structlog.testing import capture_logs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.config import RunTrackerConfig, SamplerConfig, TrackerConfig
from common.messages import SampleHeader
from common.streams.broker import Broker
from common.streams.ledger import SamplerLedger
from common.streams.presence import Presence
from common.streams.tasks import TaskInbox
from launcher.folder.metrics import Metrics, read_metrics
from sampler.batches import ClosedBatch, OpenBatch
from sampler.files.metrics_file import NOT_WRITTEN, Entry, Histogram, MetricsFile, not_written
from sampler.metrics import EpisodeMetrics, SamplerMetrics, staleness
from sampler.process_metrics import MAX_VALUES, ProcessMetrics
from sampler.records import EvaluationCounts, OpenSample
from sampler.state import SamplerState
from sampler.tracker import ValueTracker, Visit
from sampler.trackers.tensorboard_tracker import TensorBoardTracker
from sampler.value_audit import ValueAudit
from tests.support.sampler import make_config
from tests.support.streams import dispatch

LOG = structlog.get_logger()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def entry(version: int, value: float = 1.0, process: str = "sampler", name: str = "a") -> Entry:
    return Entry(version, process, {name: value}, time=1_700_000_000.125)  # always as many digits


def test_an_entry_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    histogram = Histogram.of_integers(np.array([2, 0, 2]))
    assert (histogram.edges, histogram.counts) == ([-0.5, 0.5, 1.5, 2.5], [1, 0, 2])
    written = Entry(3, "generator-1", {"a": 0.25, "b": 1e9}, {"ages": histogram}, time=12.5)
    assert Entry.parse(written.line()) == written
    MetricsFile(tmp_path, LOG).append([Entry(1, "sampler", {"k": math.inf, "mean": math.nan, "n": 1.0})])
    assert lines(tmp_path)[0]["values"] == {"n": 1}, "JSON has no other numbers"


@pytest.mark.parametrize("damaged", [b"", b"7", b"\0" * 50, b"[" * 100_000, b'{"version": 1e400, "values": {}}'])
def test_a_damaged_line_is_no_entry(damaged: bytes) -> None:
    assert Entry.parse(damaged) is None


def test_a_wide_range_has_few_bins_and_loses_none() -> None:
    numbers = np.arange(0, 10_000, 7)
    histogram = Histogram.of_integers(numbers)
    assert len(histogram.counts) + 1 == len(histogram.edges) <= 129
    assert sum(histogram.counts) == len(numbers)
    assert histogram.edges[0] < 0 < 9_996 < histogram.edges[-1]


@pytest.mark.parametrize(("cut_short", "whole"), [(entry(1).line() + entry(2).line()[:-9], [1]), (b"x" * 200_000, [])])
def test_an_entry_after_a_line_that_a_kill_cut_is_whole(tmp_path: Path, cut_short: bytes, whole: list[int]) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(cut_short)
    MetricsFile(tmp_path, LOG).append([entry(2)])
    assert [line["version"] for line in lines(tmp_path)] == [*whole, 2]


def test_a_full_disk_names_each_version_once_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    file = MetricsFile(tmp_path, LOG)
    with capture_logs() as logs:
        for version in (0, 1, 1, 2, 0):
            file.append([entry(version)])
        named = [line["versions"] for line in logs]
        assert (named, not_written(f"{NOT_WRITTEN} versions=0,1\n other versions=7")) == (["0", "1", "2"], {0, 1})
        path.unlink()
        file.append([entry(3)])
    assert [line["version"] for line in lines(tmp_path)] == [0, 1, 1, 2, 0, 3]


def test_a_file_that_is_too_large_becomes_the_old_one(tmp_path: Path) -> None:
    line = len(entry(1).line())
    file, metrics = MetricsFile(tmp_path, LOG, max_bytes=8 * line), Metrics(tmp_path)
    full = []
    for version in range(1, 14):
        if file.append([entry(version)]):
            full.append(version)
        metrics.update()
        versions = metrics.timeline("a").versions.tolist()
        assert versions == list(range(versions[0], version + 1)), "a reader has the entries of both files in order"
        assert len(versions) <= 10
    assert full == [5, 10]
    assert [line["version"] for line in lines(tmp_path)] == [11, 12, 13]
    assert read_metrics(tmp_path).series("a").versions.tolist() == list(range(6, 14))
    file.discard(8)
    assert read_metrics(tmp_path).series("a").versions.tolist() == [6, 7, 8]
    file.discard(0)
    assert read_metrics(tmp_path).names() == []


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[SamplerMetrics]:
    config = make_config(tmp_path)
    made = SamplerMetrics(config, SamplerState(config, ["p"]), LOG)
    yield made
    made.close()


def closed(batch_id: int) -> ClosedBatch:
    waiting = OpenBatch(SamplerConfig(batch_size=2), next_id=batch_id)
    waiting.add(OpenSample("a", 0, 0.0, 1.0, 3, 1, batch_id, batch_id))
    waiting.add(OpenSample("b", 1, 1.0, 0.0, 5, 2, batch_id, batch_id))
    return waiting.take_next()


def test_figures_of_a_batch_are_of_what_came_since_the_last_one(metrics: SamplerMetrics) -> None:
    assert not {"reward", "accuracy", "staleness"} & set(metrics.progress()), "they are not known yet"
    metrics._state.evaluations = {
        0: EvaluationCounts(2, answered=2),
        2: EvaluationCounts(2, answered=2, correct=1),
        5: EvaluationCounts(2, answered=1),
    }
    assert metrics.progress()["accuracy"] == 0.5, "that of the newest complete evaluation"
    for reward, parts in ((0.5, {"exact": 1.0, "mean": 100.0}), (0.0, {"exact": 0.0, "turns": 0.25})):
        header = SampleHeader(task_id="t", prompt_id="p", reward=reward, reward_parts=parts)
        metrics.add(header, Visit(0.0, 0.9, 8.0, 0.5, 1.5, 0.25, rho_clip_ratio=reward, first_sampled_ratio=2 * reward))
    metrics.waited["learner"] += 2.0
    values, after = metrics.of_batch(closed(0)), metrics.of_batch(closed(1))
    assert (values["reward/exact"], values["reward/turns"]) == (0.5, 0.25)
    assert values["reward/mean"] == 0.5, "a part does not hide the mean"
    assert (values["waiting/learner_seconds"], after["waiting/learner_seconds"]) == (2.0, 0.0)
    assert "reward/exact" not in after
    recipes = {name: values[f"tracker/{name}"] for name in ("alpha_mean", "beta_mean", "value_mean")}
    assert recipes == {"alpha_mean": 0.5, "beta_mean": 1.5, "value_mean": 0.25}
    assert (values["tracker/rho_clip_ratio"], values["tracker/first_sampled_ratio"]) == (0.25, 0.5)
    assert not any(name.startswith("tracker/alpha") for name in after)


@pytest.mark.parametrize(("drift", "clipped"), [(0.0, True), (0.005, False), (1.0, True)])
def test_a_forgetting_factor_beyond_its_bounds_is_clipped(drift: float, clipped: bool) -> None:
    tracker = ValueTracker(["p"], TrackerConfig(half_life=0.06, rho_min=0.875, rho_max=0.96))
    assert tracker.is_clipped(drift) == clipped
    assert (tracker.rho(drift) in (0.875, 0.96)) == clipped


def test_extremes_of_advantages_are_the_learners_percentiles_the_recipes(metrics: SamplerMetrics) -> None:
    assert metrics.of_batch(closed(0))["advantage/max"] == pytest.approx(0.5**0.5)
    by_turn = closed(1)
    turns = by_turn.manifest.model_copy(update={"turn_advantages": [[float(i) for i in range(10)], [10.0]]})
    values = metrics.of_batch(dataclasses.replace(by_turn, manifest=turns))
    assert (values["advantage/max"], values["advantage/min"]) == (10.0, 0.0)
    # Linear between neighbours, as `torch.quantile`.
    assert [values[f"advantage/p{q}"] for q in (10, 30, 50, 70, 90)] == pytest.approx([1, 3, 5, 7, 9])


def test_staleness_splits_into_time_in_flight_and_in_the_queue() -> None:
    waiting = OpenBatch(SamplerConfig(batch_size=1), next_id=5)
    waiting.add(OpenSample("s", 0, 0.0, 1.0, 8, 4, oldest_version=2, counted_at=4))
    assert staleness(waiting.take_next()) == {"total": [3], "in_flight": [2], "in_queue": [1]}


def test_each_process_has_an_entry_at_its_version(broker: Broker) -> None:
    ledger = SamplerLedger(broker)
    ledger.acquire()
    dispatch(ledger, 5)
    TaskInbox(broker, "g").take(2)
    generator = Presence(broker, "generator-1", "generator")
    generator.status(version=3, metrics={"generator/episodes": 7})
    generator.beat()
    Presence(broker, "sampler", "sampler").beat()
    sampler, other = ProcessMetrics(broker).entries(5, "", {"samples/per_second": 2.0})
    assert (sampler.process, sampler.version, other.process, other.version) == ("sampler", 5, "generator-1", 3)
    assert other.values["generator/episodes"] == 7
    assert other.values["process/memory_mb"] > 1
    assert sampler.values["processes/generator"] == sampler.values["processes/sampler"] == 1
    assert {"samples/per_second", "process/cpu_seconds"} <= sampler.values.keys()
    queues = {name: sampler.values[f"queue/{name}"] for name in ("tasks", "leased", "outstanding", "samples", "dead")}
    assert queues == {"tasks": 3, "leased": 2, "outstanding": 5, "samples": 0, "dead": 0}
    assert sampler.values["samples/dispatched"] == 5


def test_figures_that_are_none_and_too_many_of_them_are_left_out(broker: Broker) -> None:
    figures = {f"f{i}": 1.0 for i in range(2 * MAX_VALUES)} | {"x" * 1000: 1.0, "text": "1"}
    status = {"role": "generator", "pid": 1, "host": "h", "state": "running", "metrics": figures}
    for name, packed in (("many", msgpack.packb(status)), ("odd", msgpack.packb(status | {"metrics": [1]}))):
        Presence(broker, name, "generator").beat()
        broker.redis.hset(broker.key("processes"), name, packed)
    _, many = ProcessMetrics(broker).entries(0, "", {})
    assert (many.process, len(many.values)) == ("many", MAX_VALUES)


def audited(values: np.ndarray, rewards: np.ndarray, batches: int = 8) -> dict[str, float]:
    audit, figures = ValueAudit(ValueTracker(["a"], TrackerConfig())), {}
    for part in np.array_split(np.stack([values, rewards], 1), batches):
        for value, reward in part.tolist():
            audit.add(value, reward)
        figures = audit.of_batch()
    return {name.removeprefix("tracker/"): value for name, value in figures.items()}


def test_the_variance_ratio_is_that_within_batches() -> None:
    rng = np.random.default_rng(0)
    rates = rng.choice([0.1, 0.9], 4096)
    figures = audited(rates, (rng.random(4096) < rates).astype(float))
    # Var(r) = 0.25, and 0.09 of it is left within prompts.
    assert figures["variance_ratio"] == pytest.approx(0.36, abs=0.02)
    assert figures["variance_ratio_low"] < 0.36 < figures["variance_ratio_high"] < figures["variance_ratio_low"] + 0.1
    assert figures["calibration_error"] < 0.02
    assert figures["reward_where_value_is_0.1"] == pytest.approx(0.1, abs=0.03)
    assert "reward_where_value_is_0.5" not in figures
    coins = (rng.random(4096) < 0.5).astype(float)
    constant = audited(np.full(4096, 0.9), coins)
    assert constant["variance_ratio"] == pytest.approx(1.0)
    assert constant["calibration_error"] == pytest.approx(0.4, abs=0.03)
    assert audited(rng.random(4096), coins)["variance_ratio"] > 1.25
    few = np.array([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    assert "variance_ratio_low" not in audited(few / 2, few, batches=3), "a band needs some batches"
    assert "variance_ratio" not in audited(few, np.ones(6), batches=3), "and a ratio rewards that differ"


def test_always_and_never_solved_prompts_are_counted() -> None:
    tracker = ValueTracker(list("abcde"), RunTrackerConfig())
    for prompt_id, rewards in {"a": (1, 1), "b": (0, 0, 0), "c": (1, 0), "d": (1,)}.items():
        for reward in rewards:
            tracker.update(prompt_id, reward, kl=0.03)
    audit = ValueAudit(tracker)
    histograms, figures = audit.of_pool(), audit.of_batch()
    assert [figures[f"tracker/{name}"] for name in ("visited", "always_solved", "never_solved")] == [0.8, 0.5, 0.25]
    assert figures["tracker/k"] in (np.inf, 64, 32, 16, 8, 4, 2, 1, 0.5)
    assert histograms["tracker/visits"].counts == [1, 1, 2, 1]
    assert sum(histograms["tracker/value_percent"].counts) == 5


def test_figures_of_all_prompts_are_made_now_and_then() -> None:
    audit, made = ValueAudit(ValueTracker([f"p{i}" for i in range(320)], RunTrackerConfig())), []
    for _ in range(60):
        audit.add(0.5, 1.0)
        made.append(bool(audit.of_pool()))
    assert [number for number, new in enumerate(made) if new] == [0, 20, 40]


def curve(folder: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard" / "learner")).Reload()
    return [(point.step, point.value) for point in events.Scalars("actor/loss")]


def loss(version: int, value: float) -> Entry:
    return entry(version, value, "learner", "actor/loss")


def test_tensorboard_writes_over_repeated_steps_and_no_others(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(make_config(tmp_path), tmp_path, "")
    late = Entry(5, "learner", {"process/cpu_seconds": 1.0})  # takes no step away
    tracker.log([*(loss(version, 0.0) for version in range(1, 7)), late])
    tracker.log([loss(4, 1.0), loss(5, 1.0), Entry(4, "learner", {"process/cpu_seconds": 1.0})])
    tracker.close(True)
    assert curve(tmp_path) == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]


def test_rows_of_episodes_are_counted_where_one_has_several() -> None:
    episodes = EpisodeMetrics()
    episodes.add(SampleHeader(task_id="t0", prompt_id="p"))
    assert "num_rows/mean" not in episodes.values()
    episodes.add(SampleHeader(task_id="t1", prompt_id="p", tokens=9, row_tokens=[2, 3, 4]))
    assert episodes.values()["num_rows/mean"] == 2.0


def test_requests_of_agents_are_counted_by_their_own_episodes() -> None:
    episodes = EpisodeMetrics()
    episodes.add(SampleHeader(task_id="t0", prompt_id="p"))
    assert not any(name.startswith("agent/") for name in episodes.values())
    counts = {"requests": 4, "retries": 1, "dropped": 2, "prompt_tokens": 40, "kept_tokens": 30}
    episodes.add(SampleHeader(task_id="t1", prompt_id="p", reason="agent_failed", **counts))
    episodes.add(SampleHeader(task_id="t2", prompt_id="p", requests=2, prompt_tokens=20))
    values = episodes.values()
    assert [values[f"agent/{name}"] for name in ("requests", "retries", "dropped")] == [3.0, 0.5, 1.0]
    assert values["agent/kept_prompt_ids"] == 0.5
    endings = {name: values[name] for name in values if name.startswith("ending/")}
    assert endings == pytest.approx({"ending/agent_failed": 1 / 3, "ending/other": 2 / 3})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_tensorboard_files_are_begun_again_after_errors(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(make_config(tmp_path), tmp_path, "")
    tracker.log([loss(1, 1.0)])
    shutil.rmtree(tmp_path / "tensorboard")
    with pytest.raises(OSError, match="learner"):
        tracker.log([loss(2, 2.0)])
    tracker.log([loss(2, 2.0)])
    tracker.close(True)
    assert curve(tmp_path) == [(2, 2.0)]


def test_tensorboards_oldest_files_are_removed(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(make_config(tmp_path), tmp_path, "")
    tracker._max_bytes = 2000
    for version in range(1, 100):
        tracker.log([loss(version, 1.0)])
    tracker.close(True)
    files = [path.stat().st_size for path in (tmp_path / "tensorboard/learner").iterdir()]
    assert len(files) > 1
    assert sum(files) < 3000
    versions = [version for version, _ in curve(tmp_path)]
    assert versions == list(range(versions[0], 100))
