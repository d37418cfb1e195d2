"""A run with six sources: agents on the SDKs of OpenAI and Anthropic and without any, programs, reasoning-gym, a user.

It trains an adapter with GRPO. A generator and the sampler are killed on the way; each episode is judged once and the
way its source says, and no group is broken up.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter, defaultdict
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
STEPS, BATCH, GROUP, HELDOUT = 3, 48, 2, 8
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
# About half of the texts of a model that has learned nothing earn it; it differs between reference answers.
JUDGE = """
def half(text, answer, row):
    text = text.strip()
    return float(text != "" and sum(map(ord, text + answer)) % 2)
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
# Some problems of reasoning-gym have this answer.
GUESSES = [f"<answer>{' ' * n}1</answer>" for n in range(8)]
FREQUENT = [*GUESSES, *(calculator_call(f"{n}+1") for n in range(4)), *(code_call(f"print({n})") for n in range(4))]


def write_sources(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Write the problems of each source; agents share one task's and have different ones."""
    sides = defaultdict(list)
    for name, (task, episode) in SOURCES.items():
        train, heldout = TASKS[task].split(seed=0, train=600, heldout=len(AGENTS) * HELDOUT)
        if name == "gym":
            train = [problem for problem in train if problem.answer == "1"]
        part = slice(AGENTS.index(name), None, len(AGENTS)) if name in AGENTS else slice(0, None, len(AGENTS))
        for side, problems in (("train", train), ("heldout", heldout)):
            path = folder / f"{name}-{side}.jsonl"
            write(problems[part], path)
            sides[side].append({"path": str(path), "name": name, "episode": {"reward": "judge:half"} | episode})
    return dict(sides)


def reward_of(episode: dict[str, Any]) -> float:
    """What `half` gives for the model's last turn; for nothing, where it did not end that turn or made a call in it."""
    *before, last = episode["messages"]
    if last["role"] == "user":  # the simulated user replies only to turns that the model ended
        last, ended = before[-1], True
    else:
        ended = last["role"] == "assistant" and episode["reason"] == "stop"
    text = last["content"].strip() if ended else ""
    return float(text != "" and sum(map(ord, text + episode["gts"])) % 2)


def test_each_source_is_judged_its_own_way_once_and_groups_stay_whole(tmp_path: Path, own_redis: RedisServer) -> None:
    sections = {
        "run": {"steps": STEPS},
        "model": {"max_model_len": 640},
        "data": {**write_sources(tmp_path), "max_prompt_tokens": 448},
        "algorithm": {"method": "grpo", "group_size": GROUP},
        "sampler": {"batch_size": BATCH},
        "learner": {"lora": {"rank": 4}},
        "episode": {"max_response_tokens": 96, "max_seconds": 60, "rollouts_every": 1},
        "eval": {"every": 0},
    }
    config = write_run(tmp_path, "mixed", sections)
    save_model(tmp_path / "model", TASKS["code"].extra_tokens, frequent=FREQUENT, pull=(4.0, 5.5))
    (tmp_path / "agent.py").write_text(PROGRAM)
    environment = importing(tmp_path, {"claude_agent": inspect.getsource(claude_agent), "judge": JUDGE})
    broker = connect(BrokerConfig(url=own_redis.url, dead_after=3.0), "mixed")
    command = ("run", config, "--plain", "--generators", "1", "--redis", own_redis.url)
    with started(tmp_path / "run.log", *command, environment=environment) as process:
        for version, victim in ((1, "generator"), (2, "sampler")):
            wait_for_version(broker, version, process)
            kill(broker, victim)
        assert process.wait(timeout=1500) == 0, (tmp_path / "run.log").read_text()[-3000:]

    counters = settled_counters(broker)
    assert counters["batched"] == counters["grouped"] == STEPS * BATCH
    left = {name: counters.get(name, 0) for name in ("late", "abandoned", "refilled", "set_aside")}
    assert left == dict.fromkeys(left, 0)
    assert counters.get("degenerate", 0) < counters["grouped"], "some groups taught something"
    rows = {name: {row["prompt"]: row for row in json_lines(*tmp_path.glob(f"{name}-*.jsonl"))} for name in SOURCES}
    episodes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    folder = tmp_path / "runs" / "mixed"
    for episode in kept_episodes(folder):
        (source,) = [name for name in SOURCES if episode["input"] in rows[name]]
        episodes[source].append(episode)
    assert sum(map(len, episodes.values())) == counters["counted"]
    assert min(map(len, episodes.values())) >= HELDOUT
    trained = Counter(episode["prompt_id"] for episode in json_lines(*folder.glob("rollouts/*")))
    assert all(size % GROUP == 0 for size in trained.values())
    checked = (folder / "logs" / "generator-1.log").read_text()
    assert re.search(r"log-probs agree with.*version=[1-9]", checked), "the engine has the learner's adapter"
    assert {path.name for path in (folder / "checkpoints" / f"step_{STEPS}").iterdir()} >= {"adapter", "hf"}

    for name in ("openai", "anthropic", "code", "corrector"):
        scored = [(episode["reward"], reward_of(episode)) for episode in episodes[name]]
        assert set(scored) == {(0.0, 0.0), (1.0, 1.0)}, name
        assert any(
            message["role"] in ("tool", "user") for episode in episodes[name] for message in episode["messages"][1:]
        )
    # A reply that is cut off ends the episode before the program has rewarded itself.
    by_itself = {(episode["reason"], episode["reward"]) for episode in episodes["program"]}
    assert ("stop", 0.25) in by_itself
    assert by_itself <= {("stop", 0.25), ("length", 0.0)}

    outputs = [message for episode in episodes["code"] for message in episode["messages"] if message["role"] == "tool"]
    assert sum(episode["tool_calls"] for episode in episodes["code"]) == len(outputs) > 0

    scored = []
    for episode in episodes["gym"]:
        row = rows["gym"][episode["input"]]
        text = episode["messages"][-1]["content"] if episode["reason"] == "stop" else ""
        answer = ReasoningGym().answer(Outcome(text))
        right = score_answer(row["family"], answer, json.loads(row["entry"])) == 1
        scored.append((episode["reward"], float(right)))
    assert set(scored) == {(0.0, 0.0), (1.0, 1.0)}
    assert len({rows["gym"][episode["input"]]["family"] for episode in episodes["gym"]}) >= 3
