"""`spo quickstart -o algorithm.method=grpo` in small, of an adapter, the sampler killed midway: groups stay whole."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from common.config import BrokerConfig
from common.streams.broker import connect
from tests.conftest import RedisServer
from tests.support.whole_run import (
    cache_of_quickstart,
    importing,
    json_lines,
    kill,
    options,
    settled_counters,
    started,
    wait_for_version,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STEPS, BATCH, GROUP, HELDOUT = 3, 32, 4, 8
SETTINGS = {
    "episode.reward": "parity:even",
    "algorithm.method": "grpo",
    "algorithm.group_size": GROUP,
    "learner.lora.rank": 4,
    "sampler.batch_size": BATCH,
    "eval.every": 0,
    "eval.limit": HELDOUT,
    "episode.rollouts_every": 1,
    "broker.dead_after": 3.0,
}
# Half of what a random model says earns it.
PARITY = "def even(text, answer, row):\n    return float(len(text) % 2 == 0)\n"


def test_groups_stay_whole_also_when_the_sampler_is_killed(own_redis: RedisServer, tmp_path: Path) -> None:
    environment = cache_of_quickstart(tmp_path) | importing(tmp_path, {"parity": PARITY})
    broker = connect(BrokerConfig(url=own_redis.url, dead_after=3.0), "quickstart-1")
    command = ("quickstart", "--plain", "--generators", "1", "--redis", own_redis.url, "--output", tmp_path / "runs")
    log = tmp_path / "quickstart.log"
    with started(log, *command, "--steps", STEPS, *options(SETTINGS), environment=environment) as quickstart:
        wait_for_version(broker, 1, quickstart)
        kill(broker, "sampler")
        assert quickstart.wait(timeout=1500) == 0, log.read_text()[-3000:]
    counters = settled_counters(broker)
    assert counters["batched"] == STEPS * BATCH
    left = {name: counters.get(name, 0) for name in ("late", "abandoned", "refilled", "set_aside")}
    assert left == dict.fromkeys(left, 0)
    assert counters["rewarded"] == counters["grouped"] == STEPS * BATCH
    assert counters.get("degenerate", 0) < counters["grouped"], "some groups taught something"

    folder = tmp_path / "runs" / "quickstart-1"
    episodes = json_lines(*folder.glob("rollouts/*"))
    assert len(episodes) == len({episode["task_id"] for episode in episodes}) == STEPS * BATCH
    assert all(size % GROUP == 0 for size in Counter(episode["prompt_id"] for episode in episodes).values())
    assert "degenerate groups" in log.read_text()

    checked = (folder / "logs" / "generator-1.log").read_text()
    assert re.search(r"log-probs are the learner's.*version=[1-9]", checked), "the engine has the learner's adapter"
    assert {path.name for path in (folder / "checkpoints" / f"step_{STEPS}").iterdir()} >= {"adapter", "hf"}
