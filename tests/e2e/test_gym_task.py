"""`spo quickstart --task gym` in small, with a generator killed in the middle: its verifiers judge every task once."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.config import BrokerConfig
from common.gym_families import score_answer
from common.streams.broker import connect
from generator.rewards import Outcome
from generator.rewards.reasoning_gym import ReasoningGym
from launcher.quickstart.cache import cached_model, key
from launcher.tasks import TASKS
from launcher.tasks.task import Recipe
from tests.conftest import RedisServer
from tests.support.quickstart import ends_with_each_task_counted_once, kill, started_quickstart, wait_for_version

pytestmark = pytest.mark.e2e
STEPS, BATCH, HELDOUT = 3, 32, 24


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache in which the quickstart finds its initial model: one that has learned for seconds only."""
    task = TASKS["gym"]
    trained = cached_model(replace(task, recipe=Recipe(steps=12, rows=32, warmup=3)), cache=tmp_path / "cache" / "spo")
    trained.rename(trained.with_name(f"warm-start-{key(task)}"))
    return tmp_path / "cache"


@pytest.fixture
def quickstart(cache: Path, own_redis: RedisServer, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command with all it starts; ended by its process id if the test fails."""
    settings = {
        "sampler.batch_size": BATCH,
        "eval.every": 0,
        "eval.limit": HELDOUT,
        "episode.rollouts_every": 1,
        "broker.heartbeat": 0.5,
        "broker.dead_after": 3.0,
    }
    options = "--task", "gym", "--steps", str(STEPS)
    environment = {"XDG_CACHE_HOME": str(cache)}
    with started_quickstart(tmp_path, own_redis.url, settings, *options, environment=environment) as process:
        yield process


def test_every_task_is_judged_once_by_its_family_s_verifier_also_when_a_generator_is_killed(
    quickstart: subprocess.Popen[str], own_redis: RedisServer, tmp_path: Path
) -> None:
    broker = connect(BrokerConfig(url=own_redis.url, dead_after=3.0), "quickstart-gym-1")
    wait_for_version(broker, 1, quickstart)
    kill(broker, "generator")
    counters = ends_with_each_task_counted_once(quickstart, broker, tmp_path, STEPS * BATCH)
    assert counters.get("set_aside", 0) == 0
    folder = tmp_path / "runs" / "quickstart-gym-1"
    inputs = [
        json.loads(line) for path in (folder / "inputs").glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    rows = {row["prompt"]: row for row in inputs}
    files = [*folder.glob("rollouts/*.jsonl"), *folder.glob("validation_data/*.jsonl")]
    episodes = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert len(episodes) == counters["counted"]
    families = set()
    for episode in episodes:
        row = rows[episode["input"]]
        families.add(row["family"])
        ended = episode["reason"] == "stop"
        answer = ReasoningGym().answer(Outcome(episode["messages"][-1]["content"] if ended else ""))
        assert episode["reward"] == float(score_answer(row["family"], answer, json.loads(row["entry"])) == 1)
    assert len(families) >= 8
