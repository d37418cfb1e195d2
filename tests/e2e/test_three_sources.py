"""A run with three sources, each with an episode of its own: programs, reasoning-gym, a correcting user."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config import BrokerConfig
from common.gym_families import score_answer
from common.streams.broker import connect
from generator.rewards import Outcome
from generator.rewards.verifiers import ReasoningGym
from launcher.quickstart.cache import cached_model
from launcher.tasks import TASKS
from launcher.tasks.task import Recipe, write
from tests.conftest import RedisServer
from tests.support.whole_run import (
    json_lines,
    kept_episodes,
    kill,
    settled_counters,
    started,
    wait_for_version,
    write_run,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]
STEPS, BATCH, HELDOUT = 3, 24, 8
EPISODES: dict[str, dict[str, Any]] = {
    "code": {"reward": "exact", "tools": ["code_interpreter"], "call_format": "code", "max_assistant_turns": 2},
    "gym": {"reward": "reasoning_gym"},
    "corrector": {"reward": "exact", "user": "corrector", "max_assistant_turns": 2}
    | {"user_options": {"turns": 1, "checker": "launcher.tasks.corrector:check"}},
}


def write_sources(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The problems of each task as its source, in `data.train` and `data.heldout`."""
    sides = defaultdict(list)
    for name, episode in EPISODES.items():
        train, heldout = TASKS[name].split(seed=0, train=200, heldout=HELDOUT)
        for side, problems in (("train", train), ("heldout", heldout)):
            write(problems, folder / f"{name}-{side}.jsonl")
            sides[side].append({"path": str(folder / f"{name}-{side}.jsonl"), "name": name, "episode": episode})
    return dict(sides)


def test_each_source_is_judged_its_own_way_once(tmp_path: Path, own_redis: RedisServer) -> None:
    # A model that writes programs, few of which are right.
    task = replace(TASKS["code"], recipe=Recipe(steps=60, rows=32, warmup=5))
    sections = {
        "run": {"steps": STEPS},
        "model": {"path": str(cached_model(task, cache=tmp_path / "cache")), "max_model_len": 640},
        "data": {**write_sources(tmp_path), "max_prompt_tokens": 448},
        "sampler": {"batch_size": BATCH},
        "episode": {"max_response_tokens": 96, "rollouts_every": 1},
        "eval": {"every": 0},
    }
    config = write_run(tmp_path, "mixed", sections)
    broker = connect(BrokerConfig(url=own_redis.url, dead_after=3.0), "mixed")
    command = ("run", config, "--plain", "--generators", "1", "--redis", own_redis.url)
    with started(tmp_path / "run.log", *command) as process:
        wait_for_version(broker, 1, process)
        kill(broker, "generator")
        assert process.wait(timeout=1500) == 0, (tmp_path / "run.log").read_text()[-3000:]

    counters = settled_counters(broker)
    assert counters["batched"] == STEPS * BATCH
    assert counters.get("set_aside", 0) == 0
    rows = {name: {row["prompt"]: row for row in json_lines(*tmp_path.glob(f"{name}-*.jsonl"))} for name in EPISODES}
    episodes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for episode in kept_episodes(tmp_path / "runs" / "mixed"):
        (source,) = [name for name in EPISODES if episode["input"] in rows[name]]
        episodes[source].append(episode)
    assert sum(map(len, episodes.values())) == counters["counted"]
    assert min(map(len, episodes.values())) >= 2 * HELDOUT

    for episode in episodes["code"]:
        last = episode["messages"][-1]
        assert episode["reward"] == float(last["role"] == "assistant" and last["content"].strip() == episode["gts"])
    outputs = [message for episode in episodes["code"] for message in episode["messages"] if message["role"] == "tool"]
    assert sum(episode["tool_calls"] for episode in episodes["code"]) == len(outputs) > HELDOUT

    for episode in episodes["gym"]:
        row = rows["gym"][episode["input"]]
        ended = episode["reason"] == "stop"
        answer = ReasoningGym().answer(Outcome(episode["messages"][-1]["content"] if ended else ""))
        assert episode["reward"] == float(score_answer(row["family"], answer, json.loads(row["entry"])) == 1)
    assert len({rows["gym"][episode["input"]]["family"] for episode in episodes["gym"]}) >= 8

    replies = [message for episode in episodes["corrector"] for message in episode["messages"][1:]]
    assert sum(message["role"] == "user" for message in replies) > HELDOUT
