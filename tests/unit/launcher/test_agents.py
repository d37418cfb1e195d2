"""Episodes that agents play: what `spo agent try` prints of them, and what the audit finds in them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.messages import Task
from launcher.agent import lines_of, played
from launcher.audit.evidence import Evidence
from launcher.audit.rewards import score_again
from launcher.audit.tokens import flaw_of
from sampler.prompts.prompt_set import load_data
from tests.support.agents import agent_config, agent_tasks, kept_line
from tests.support.sampler_driving import LOG

NO_PATH = (404, "/v1/completions", "there is no such path here")


def asked(row: dict[str, Any], prompt_id: str = "p", kind: str = "train") -> Task:
    """A task that the scripted agent plays as its row says."""
    return Task(task_id="t", prompt_id=prompt_id, prompt="What is 1+1?", answer="2", row=row, kind=kind, keep=True)


def tried(row: dict[str, Any], messages: bool = False, **episode: Any) -> list[str]:
    async def play() -> dict[str, Any]:
        async with agent_tasks(agent_config(**episode)) as (runner, _):
            return await played(runner, asked(row))

    return list(lines_of(asyncio.run(play()), messages))


def test_a_task_is_shown_with_its_requests_its_answer_and_its_reward() -> None:
    row = {"asks": ["yes", "no"], "returns": "2", "refused": [NO_PATH]}
    prompt, title, first, second, refused, kept, tokens, *end = tried(row, reward="exact")
    assert (prompt, title) == ("prompt: What is 1+1?", "requests:")
    assert first.endswith("sampled (stop), row 1")
    assert "of them kept from 0" in second
    assert refused == "  refused: 1 × 404 for /v1/completions: there is no such path here"
    assert kept.endswith("of the later requests' prompt ids")
    assert tokens.startswith("row 1: ")
    assert end == ["ended by: stop", "the agent's answer: 2", "reward: 1 (exact 1)"]


def test_an_attempt_that_fails_shows_what_it_was_answered() -> None:
    shown = tried({"refused": [NO_PATH] * 3})
    assert shown[2] == "  refused: 3 × 404 for /v1/completions: there is no such path here"
    failure = "failed: AgentFailed: the agent never called the model: 3 requests were refused: 3 × 404"
    assert shown[-1].startswith(failure)


def test_messages_are_shown_on_demand() -> None:
    shown = tried({"asks": ["2"]}, messages=True, reward="agent", agent={"function": "tests.support.agents:scripted"})
    assert shown[1:3] == ["request 0, user: What is 1+1?", "request 0, assistant: 2"]
    assert shown[-1].startswith("failed: ValueError: the agent gave no reward")


FAILS = {"function": "tests.support.agents:scripted", "failure": 0.25}
AGENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "returns another text than the right one it said": ({"reward": "exact"}, {"asks": ["2"], "returns": "3"}),
    "returns data": ({"reward": "length"}, {"asks": ["2"], "returns": {"sum": 2}}),
    "leaves its answer in the last message": ({"reward": "exact"}, {"asks": ["2"]}),
    "sends its reward": ({"reward": "agent"}, {"asks": ["2"], "sends": 0.125, "returns": "two"}),
    "gives one part of the reward": ({"reward": {"agent": 0.5, "exact": 0.5}}, {"asks": ["2"], "returns": 0.5}),
    "is ended before it gives a reward": (
        {"reward": "agent", "max_assistant_turns": 1}, {"asks": ["a", "b"], "returns": 1.0},
    ),
    "fails": ({"reward": "exact", "agent": FAILS}, {"asks": ["2"], "raises": "out of ideas"}),
}  # fmt: skip


def agents_run(folder: Path, kind: str, episode: dict[str, Any], row: dict[str, Any]) -> tuple[Evidence, Path]:
    """A run with one kept episode, which an agent has played, and the file of it."""
    prompt = {"prompt": "What is 1+1?", "answer": "2", "ground_truth": "2"} | row
    (folder / "data.jsonl").write_text(json.dumps(prompt) + "\n")
    data = {"train": f"{folder}/data.jsonl", "heldout": f"{folder}/data.jsonl"}
    config = agent_config({"data": data, "run": {"experiment": "x", "output_dir": str(folder)}}, **episode)
    prompts = load_data(config.data, LOG)
    (task_id,) = prompts.train.ids
    line = kept_line(config, asked(row, task_id, kind))
    path = config.run.folder / ("rollouts" if kind == "train" else "validation_data") / "0.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(line + b"\n")
    return Evidence(config, prompts, redis=None, folder=None, log=LOG), path  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("agent", AGENTS)
def test_what_an_agent_gave_is_scored_again(tmp_path: Path, agent: str, kind: str) -> None:
    run, path = agents_run(tmp_path, kind, *AGENTS[agent])
    assert asyncio.run(score_again(run)) == ("", "")
    episode = json.loads(path.read_text())
    assert flaw_of(episode) == ""
    for change in ({"reward": 0.8}, {"scored": {}}):
        path.write_text(json.dumps(episode | change) + "\n")
        problem, _ = asyncio.run(score_again(run))
        assert problem.startswith("1: t ")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda line: line["messages"].pop(), "2 answered requests and replies to 1"),
        (lambda line: line["requests"].clear(), "0 answered requests and replies to 2"),
        (lambda line: line["requests"][1].update(sampled=99), "model_tokens 4, by its requests 101"),
        (lambda line: line["requests"][1].update(prompt=99), "by its requests 101"),
        (lambda line: line["requests"][1].update(row=None), "turns 2, by its requests 1"),
        (lambda line: line["requests"][1].update(row=1), "rows 1, by its requests 2"),
        (lambda line: line.update(tool_calls=1), "tool_calls 1, by its requests 0"),
    ],
)
def test_an_agents_counts_are_those_of_its_requests(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], found: str
) -> None:
    _, path = agents_run(tmp_path, "eval", {"reward": "exact"}, {"asks": ["1", "2"]})
    line = json.loads(path.read_text())
    change(line)
    assert found in flaw_of(line)


@pytest.mark.integration  # the reward runs in a process
@pytest.mark.parametrize("name", ["SizeOfFolder", "size_of_folder"])
def test_a_reward_that_read_an_agents_files_is_not_computed_again(tmp_path: Path, name: str) -> None:
    reward = f"tests.support.some_rewards:{name}"
    run, _ = agents_run(tmp_path, "train", {"reward": reward, "reward_workers": 1}, {"asks": ["2"], "files": "x"})
    for source in ("data.train", "data.heldout"):
        skipped = f"{source} skipped: {reward} may have read the agent's folder, which is gone"
        assert skipped in asyncio.run(score_again(run))[1].split("; ")
