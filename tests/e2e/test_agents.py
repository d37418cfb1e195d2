"""Agents in whole runs: on the SDKs of OpenAI and Anthropic as they are, and as a program without any."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config import BrokerConfig
from common.streams.broker import connect
from launcher.quickstart.cache import cached_model
from launcher.tasks import TASKS
from launcher.tasks.task import Recipe, write
from tests.conftest import RedisServer
from tests.support import claude_agent
from tests.support.whole_run import (
    importing,
    json_lines,
    kept_episodes,
    kill,
    settled_counters,
    spo,
    started,
    wait_for_version,
    write_run,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TASK = TASKS["agent"]
STEPS, BATCH, HELDOUT = 3, 24, 8
CLAUDE = {"claude_agent": inspect.getsource(claude_agent)}
# Asks once, answers with what it was told, and rewards itself; knows only what any program is given.
PROGRAM = """
import json, os, sys
from urllib.request import Request, urlopen

def post(url, value):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    return json.load(urlopen(Request(url, json.dumps(value).encode(), headers)))

task = json.load(sys.stdin)
messages = [{"role": "user", "content": task["prompt"]}]
body = {"model": os.environ["SPO_MODEL"], "messages": messages}
reply = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]["content"]
with open(os.environ["SPO_ANSWER_FILE"], "w") as file:
    file.write(reply or "")
post(task["reward_url"], {"reward": 0.25})
"""
EPISODES: dict[str, dict[str, Any]] = {
    "openai": {"agent": "launcher.tasks.calculator_agent:solve"},
    "anthropic": {"agent": "claude_agent:solve"},
    "program": {"agent": {"command": ["python", "agent.py"]}, "reward": "agent"},
}


def test_agents_of_each_kind_are_judged_once(tmp_path: Path, own_redis: RedisServer) -> None:
    train, heldout = TASK.split(seed=0, train=600, heldout=3 * HELDOUT)
    data: dict[str, Any] = {"train": [], "heldout": [], "max_prompt_tokens": 64}
    for number, (name, episode) in enumerate(EPISODES.items()):
        for side, problems in (("train", train), ("heldout", heldout)):
            path = tmp_path / f"{name}-{side}.jsonl"
            write(problems[number :: len(EPISODES)], path)
            data[side].append({"path": str(path), "name": name, "episode": episode})
    (tmp_path / "agent.py").write_text(PROGRAM)
    # A model that asks the calculator now and then.
    task = replace(TASK, recipe=Recipe(steps=100, rows=32, warmup=5))
    sections = {
        "run": {"steps": STEPS},
        "model": {"path": str(cached_model(task, cache=tmp_path / "cache")), "max_model_len": 256},
        "data": data,
        "sampler": {"batch_size": BATCH},
        "episode": {"max_response_tokens": 96, "max_seconds": 60, "rollouts_every": 1},
        "eval": {"every": 0},
    }
    config = write_run(tmp_path, "agents", sections)
    broker = connect(BrokerConfig(url=own_redis.url, dead_after=3.0), "agents")
    command = ("run", config, "--plain", "--generators", "1", "--redis", own_redis.url)
    with started(tmp_path / "run.log", *command, environment=importing(tmp_path, CLAUDE)) as process:
        wait_for_version(broker, 1, process)
        kill(broker, "generator")
        assert process.wait(timeout=1500) == 0, (tmp_path / "run.log").read_text()[-3000:]

    counters = settled_counters(broker)
    assert counters["batched"] == STEPS * BATCH
    assert counters.get("set_aside", 0) == 0
    prompts = {name: {row["prompt"] for row in json_lines(*tmp_path.glob(f"{name}-*.jsonl"))} for name in EPISODES}
    episodes: dict[str, list[dict[str, Any]]] = {name: [] for name in EPISODES}
    for episode in kept_episodes(tmp_path / "runs" / "agents"):
        (source,) = [name for name in EPISODES if episode["input"] in prompts[name]]
        episodes[source].append(episode)
    assert sum(map(len, episodes.values())) == counters["counted"]
    asked = [*episodes["openai"], *episodes["anthropic"]]
    assert any(message["role"] == "tool" for episode in asked for message in episode["messages"])
    for episode in asked:
        last = episode["messages"][-1]
        assert last["role"] == "assistant"
        answered = episode["reason"] == "stop" and last["content"].strip() == episode["gts"]
        assert episode["reward"] == float(answered), episode
    assert {(episode["reason"], episode["reward"]) for episode in episodes["program"]} == {("stop", 0.25)}


@pytest.mark.timeout(1800)  # on a machine on which no quickstart ran, it trains the initial model too
def test_an_agent_on_anthropics_sdk_learns(tmp_path: Path) -> None:
    ran = spo(
        "quickstart", "--task", "agent", "--plain", "--steps", "20", "--output", tmp_path / "runs",
        "-o", "episode.agent=claude_agent:solve", timeout=1700, **importing(tmp_path, CLAUDE),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    values = [row["values"] for row in json_lines(metrics)]
    accuracies = [value["validation/accuracy"] for value in values if "validation/accuracy" in value]
    assert accuracies[0] < 0.5
    assert accuracies[-1] >= 0.95
