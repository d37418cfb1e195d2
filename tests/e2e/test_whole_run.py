"""A whole run on real vLLM, DeepSpeed and Redis, in which every kind of process is killed once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import BrokerConfig
from common.messages import Batch
from common.streams.broker import Broker, connect
from common.streams.steps import latest
from launcher.dashboard.episode_view import trained_view
from launcher.folder.metrics import read_metrics
from launcher.folder.training_data import training_line
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from launcher.trace.events import read_timelines
from tests.conftest import RedisServer
from tests.support.documented import metric_pattern
from tests.support.quickstart import kill, wait_for_version
from tests.support.tracked import TRACKERS, offline, read_back

pytestmark = pytest.mark.e2e
STEPS, BATCH, HELDOUT = 8, 16, 6
TRAIN = ("learner", "train")  # process and name of its slices


@pytest.fixture
def config(tmp_path: Path, own_redis: RedisServer) -> Path:
    """A random tiny model, prompts, and a small run on a Redis of its own."""
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path / "model")
    for name, count in (("train", 200), ("heldout", HELDOUT)):
        rows = [json.dumps({"prompt": f"{name} {i}", "answer": str(i % 10)}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    settings = {
        "run": {"name": "whole", "experiment": "whole", "output_dir": str(tmp_path / "runs"), "steps": STEPS}
        | {"log_to": list(TRACKERS)},
        "model": {"path": str(tmp_path / "model"), "dtype": "float32", "max_model_len": 128},
        "data": {"train": str(tmp_path / "train.jsonl"), "heldout": str(tmp_path / "heldout.jsonl")}
        | {"max_prompt_tokens": 64},
        "sampler": {"batch_size": BATCH, "max_staleness": 2, "tracker": {"reward_range": [-1, 1]}},
        "algorithm": {"turn_advantage": "turn"},
        "generator": {"max_concurrency": 16},
        "learner": {"dtype": "float32", "lr": 1e-4, "checkpoint_every": 3, "token_budget": 2048},
        # Nearly every answer of a random model is wrong, and each costs something.
        "episode": {"max_response_tokens": 32, "rollouts_every": 2, "max_assistant_turns": 3, "user": "corrector"}
        | {"user_options": {"message": "No.", "penalty": 0.25}},
        "eval": {"every": 4},
        "broker": {"url": own_redis.url, "heartbeat": 0.5, "dead_after": 3.0},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture
def broker(own_redis: RedisServer) -> Broker:
    return connect(BrokerConfig(url=own_redis.url, dead_after=3.0), "whole")


@pytest.fixture
def launcher(config: Path, own_redis: RedisServer, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`spo run`, with all it starts; ended by its process id if a test fails."""
    command = [sys.executable, "-m", "launcher.cli", "run", str(config), "--plain", "--generators", "1"]
    with (tmp_path / "launcher.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--redis", own_redis.url], stderr=log, stdout=log, text=True, env=os.environ | offline(tmp_path)
        )
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def test_a_run_in_which_everything_is_killed_once_counts_every_task_once(
    launcher: subprocess.Popen[str],
    broker: Broker,
    own_redis: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killers: list[tuple[int, Callable[[], Any]]] = [
        (1, lambda: kill(broker, "generator")),
        (2, lambda: kill(broker, "sampler")),
        (4, lambda: kill(broker, "learner")),
    ]
    for version, strike in killers:
        wait_for_version(broker, version, launcher)
        strike()
    wait_for_version(broker, 6, launcher)
    batches = [Batch.unpack(fields[b"batch"]) for _, fields in broker.redis.xrange(broker.key("batches"))]
    own_redis.kill()
    own_redis.start()

    assert launcher.wait(timeout=300) == 0, (tmp_path / "launcher.log").read_text()[-3000:]
    # What the learner weighs each turn of an episode by: the earlier one also has the penalties that followed.
    of_turns = [turns for batch in batches for turns in batch.turn_advantages or ()]
    several = [turns for turns in of_turns if len(turns) > 1]
    assert several
    assert all(earlier < later for turns in several for earlier, later in pairwise(turns))
    counters = broker.counters()
    # A generator that is killed in the middle of an evaluation takes its version with it.
    assert counters["dispatched"] == counters["counted"] == counters["finished"] + counters.get("superseded", 0)
    assert counters["batched"] == STEPS * BATCH
    assert counters["rewarded"] == STEPS * BATCH + counters.get("late", 0)
    evaluations = broker.evaluations()
    versions = [found["version"] for found in evaluations]
    assert [found["samples"] for found in evaluations] == [HELDOUT] * len(versions)
    assert versions == sorted(set(versions))
    assert versions[-1] == STEPS
    step = latest(broker)
    assert step is not None
    assert step.version == STEPS
    left = {name: broker.redis.xlen(broker.key(name)) for name in ("tasks", "samples", "batches", "dead")}
    assert left == {"tasks": 0, "samples": 0, "batches": 0, "dead": 0}
    assert list(broker.redis.scan_iter(broker.key("payload:*").replace("{", "\\{"))) == []

    from transformers import AutoModelForCausalLM

    folder = tmp_path / "runs" / "whole"
    AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / f"step_{STEPS}" / "hf")
    for version in versions:
        rows = (folder / "validation_data" / f"{version}.jsonl").read_text().splitlines()
        assert [json.loads(row)["versions"] for row in rows] == [[version, version]] * HELDOUT
    assert {"input", "output", "gts"} <= set(json.loads(rows[0]))
    kept = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("rollouts/*")
    }
    episodes = [episode for rows in kept.values() for episode in rows]
    assert set(kept) <= {str(version) for version in range(0, STEPS, 2)}
    assert len(episodes) == len({episode["task_id"] for episode in episodes}) >= BATCH
    assert all(len(episode["logprobs"]) == episode["model_tokens"] for episode in episodes)
    learned = [(episode, trained_view(episode, training_line(folder, episode) or {})) for episode in episodes]
    trained_on = [(episode, view) for episode, view in learned if view]
    assert len(trained_on) >= BATCH
    # Of what the weights that sampled it trained on first, the ratio is that of two ways to compute the same log-probs.
    same = [
        view for episode, view in trained_on if episode["versions"] == [view["version"]] * 2 and not view["mini_batch"]
    ]
    ratios = [ratio for view in same for ratio in view["ratios"] if ratio is not None]
    assert ratios == pytest.approx([1.0] * len(ratios), abs=0.01)
    assert len(same) > 0

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    metrics = read_metrics(folder)
    assert metrics.series("actor/loss").versions.tolist() == list(range(1, STEPS + 1))
    for tracker in TRACKERS:
        values = read_back(tracker, folder)
        assert {version for version, _ in values["actor/loss"]} == set(range(1, STEPS + 1)), tracker
        last = dict(values["reward/mean"])
        assert [last[v] for v in range(1, STEPS + 1)] == pytest.approx(metrics.series("reward/mean").values), tracker
        assert set(versions) == {version for version, _ in values["validation/accuracy"]}, tracker
    undocumented = [name for name in metrics.names() if not metric_pattern().fullmatch(name)]
    assert undocumented == [], "docs/metrics.md has every metric"

    events = read_timelines(folder).events
    assert {"launcher", "sampler", "learner", "generator-1"} == {event.process for event in events}
    trained = [event.end - event.start for event in events if event.end and (event.process, event.name) == TRAIN]
    for seconds in metrics.series("seconds/train").values:
        assert min(abs(seconds - of_slice) for of_slice in trained) < 1e-3, "the trace says what the metrics say"
    played = {event.details["task"] for event in events if event.lane == "episodes"}
    assert {episode["task_id"] for episode in episodes} <= played
    died = [event.details["process"] for event in events if event.name == "died"]
    assert {"generator-1", "sampler", "learner"} <= set(died)
