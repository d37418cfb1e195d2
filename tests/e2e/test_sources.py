"""A run with six sources: agents on the SDKs of OpenAI and Anthropic and without any, programs, reasoning-gym, a user.

A generator is killed on the way, and each episode is judged once and the way its source says.
"""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from common.config import BrokerConfig
from common.gym_families import score_answer
from common.streams.broker import connect
from generator.rewards import Outcome
from generator.rewards.verifiers import ReasoningGym
from launcher.tasks import TASKS
from launcher.tasks.special_tokens import calculator_call, code_call
from launcher.tasks.task import write
from tests.conftest import RedisServer
from tests.support import claude_agent
from tests.support.whole_run import (
    importing,
    json_lines,
    kept_episodes,
    kill,
    save_model,
    settled_counters,
    started,
    wait_for_version,
    write_run,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]
STEPS, BATCH, HELDOUT = 3, 48, 8
# Asks once, answers with the reply, and rewards itself; knows only what any program is given.
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
# The task that a source's problems are of, and its episodes.
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("agent", {"agent": "launcher.tasks.calculator_agent:solve"}),
    "anthropic": ("agent", {"agent": "claude_agent:solve"}),
    "program": ("agent", {"agent": {"command": ["python", "agent.py"]}, "reward": "agent"}),
    "code": ("code", {"tools": ["code_interpreter"], "call_format": "code", "max_assistant_turns": 2}),
    "gym": ("gym", {"reward": "reasoning_gym"}),
    "corrector": (
        "corrector",
        {"user": "corrector", "max_assistant_turns": 2}
        | {"user_options": {"turns": 1, "checker": "launcher.tasks.corrector:check"}},
    ),
}
AGENTS = ("openai", "anthropic", "program")
CALLS = [*(calculator_call(f"{n}+1") for n in range(8)), *(code_call(f"print({n})") for n in range(8))]


def write_sources(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Write the problems of each source; agents share one task's and have different ones."""
    sides = defaultdict(list)
    for name, (task, episode) in SOURCES.items():
        train, heldout = TASKS[task].split(seed=0, train=600, heldout=len(AGENTS) * HELDOUT)
        part = slice(AGENTS.index(name), None, len(AGENTS)) if name in AGENTS else slice(0, None, len(AGENTS))
        for side, problems in (("train", train), ("heldout", heldout)):
            path = folder / f"{name}-{side}.jsonl"
            write(problems[part], path)
            sides[side].append({"path": str(path), "name": name, "episode": {"reward": "exact"} | episode})
    return dict(sides)


def test_each_source_is_judged_its_own_way_once(tmp_path: Path, own_redis: RedisServer) -> None:
    sections = {
        "run": {"steps": STEPS},
        "model": {"max_model_len": 640},
        "data": {**write_sources(tmp_path), "max_prompt_tokens": 448},
        "sampler": {"batch_size": BATCH},
        "episode": {"max_response_tokens": 96, "max_seconds": 60, "rollouts_every": 1},
        "eval": {"every": 0},
    }
    config = write_run(tmp_path, "mixed", sections)
    save_model(tmp_path / "model", TASKS["code"].extra_tokens, frequent=CALLS)
    (tmp_path / "agent.py").write_text(PROGRAM)
    environment = importing(tmp_path, {"claude_agent": inspect.getsource(claude_agent)})
    broker = connect(BrokerConfig(url=own_redis.url, dead_after=3.0), "mixed")
    command = ("run", config, "--plain", "--generators", "1", "--redis", own_redis.url)
    with started(tmp_path / "run.log", *command, environment=environment) as process:
        wait_for_version(broker, 1, process)
        kill(broker, "generator")
        assert process.wait(timeout=1500) == 0, (tmp_path / "run.log").read_text()[-3000:]

    counters = settled_counters(broker)
    assert counters["batched"] == STEPS * BATCH
    assert counters.get("set_aside", 0) == 0
    rows = {name: {row["prompt"]: row for row in json_lines(*tmp_path.glob(f"{name}-*.jsonl"))} for name in SOURCES}
    episodes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for episode in kept_episodes(tmp_path / "runs" / "mixed"):
        (source,) = [name for name in SOURCES if episode["input"] in rows[name]]
        episodes[source].append(episode)
    assert sum(map(len, episodes.values())) == counters["counted"]
    assert min(map(len, episodes.values())) >= 2 * HELDOUT

    asked = [*episodes["openai"], *episodes["anthropic"]]
    for own in (episodes["openai"], episodes["anthropic"]):
        assert any(message["role"] == "tool" for episode in own for message in episode["messages"])
    for episode in asked:
        last = episode["messages"][-1]
        assert last["role"] == "assistant"
        answered = episode["reason"] == "stop" and last["content"].strip() == episode["gts"]
        assert episode["reward"] == float(answered), episode
    # A reply that is cut off ends the episode before the program has rewarded itself.
    by_itself = {(episode["reason"], episode["reward"]) for episode in episodes["program"]}
    assert ("stop", 0.25) in by_itself
    assert by_itself <= {("stop", 0.25), ("length", 0.0)}

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
    assert any(message["role"] == "user" for message in replies)
