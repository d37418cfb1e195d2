"""`spo quickstart -o algorithm.method=grpo` in small, of an adapter, the sampler killed midway: groups stay whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import BrokerConfig
from common.streams.broker import connect
from launcher.quickstart.cache import key
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from launcher.tasks import DEFAULT
from tests.conftest import RedisServer
from tests.support.quickstart import ends_with_each_task_counted_once, kill, started_quickstart, wait_for_version

pytestmark = pytest.mark.e2e
STEPS, BATCH, GROUP, HELDOUT = 3, 32, 4, 8


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache in which the quickstart finds its initial model: one that has learned nothing."""
    tokenizer = build_tokenizer(DEFAULT.extra_tokens)
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path / "cache" / "spo" / f"warm-start-{key(DEFAULT)}")
    return tmp_path / "cache"


@pytest.fixture
def quickstart(cache: Path, own_redis: RedisServer, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command with all it starts; ended by its process id if the test fails."""
    # Half of what a random model says earns it.
    (tmp_path / "parity.py").write_text("def even(text, answer, row):\n    return float(len(text) % 2 == 0)\n")
    settings = {
        "episode.reward": "parity:even",
        "algorithm.method": "grpo",
        "algorithm.group_size": GROUP,
        "learner.lora.rank": 4,
        "sampler.batch_size": BATCH,
        "eval.every": 0,
        "eval.limit": HELDOUT,
        "episode.rollouts_every": 1,
        "broker.heartbeat": 0.5,
        "broker.dead_after": 3.0,
    }
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": path}
    steps = "--steps", str(STEPS)
    with started_quickstart(tmp_path, own_redis.url, settings, *steps, environment=environment) as process:
        yield process


def test_a_run_with_groups_counts_every_task_once_and_trains_on_whole_groups_also_when_the_sampler_is_killed(
    quickstart: subprocess.Popen[str], own_redis: RedisServer, tmp_path: Path
) -> None:
    broker = connect(BrokerConfig(url=own_redis.url, dead_after=3.0), "quickstart-1")
    wait_for_version(broker, 1, quickstart)
    kill(broker, "sampler")
    counters = ends_with_each_task_counted_once(quickstart, broker, tmp_path, STEPS * BATCH)
    left = {name: counters.get(name, 0) for name in ("late", "abandoned", "refilled", "set_aside")}
    assert left == dict.fromkeys(left, 0)
    assert counters["rewarded"] == counters["grouped"] == STEPS * BATCH
    assert counters.get("degenerate", 0) < counters["grouped"], "some groups taught something"
    for name in ("tasks", "samples", "batches", "dead"):
        assert broker.redis.xlen(broker.key(name)) == 0
    assert list(broker.redis.scan_iter(broker.key("payload:*").replace("{", "\\{"))) == []

    folder = tmp_path / "runs" / "quickstart-1"
    episodes = [json.loads(line) for path in folder.glob("rollouts/*") for line in path.read_text().splitlines()]
    assert len(episodes) == len({episode["task_id"] for episode in episodes}) == STEPS * BATCH
    assert all(size % GROUP == 0 for size in Counter(episode["prompt_id"] for episode in episodes).values())
    assert "degenerate groups" in (tmp_path / "quickstart.log").read_text()

    checked = (folder / "logs" / "generator-1.log").read_text()
    assert re.search(r"log-probs are the learner's.*version=[1-9]", checked), "the engine has the learner's adapter"
    assert {path.name for path in (folder / "checkpoints" / f"step_{STEPS}").iterdir()} >= {"adapter", "hf"}
