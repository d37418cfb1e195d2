"""`spo agent try`: what it prints of a task that an agent has played, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from common.messages import Task
from generator.episode.parts import RunParts
from generator.task_runner import TaskRunner
from launcher.agent import lines_of, played
from tests.support.agents import PretendEndpoint, agent_config
from tests.support.episode import ScriptedEngine
from tests.support.spo_command import Spo

NO_PATH = (404, "/v1/completions", "there is no such path here")


def tried(row: dict[str, Any], messages: bool = False, **episode: Any) -> list[str]:
    """What is printed of a task that the scripted agent plays as its row says."""

    async def play() -> dict[str, Any]:
        config, engine, endpoint = agent_config(**episode), ScriptedEngine(), PretendEndpoint()
        parts = RunParts(config)
        runner = TaskRunner(config, engine, parts, "g", structlog.get_logger(), endpoint)  # type: ignore[arg-type]
        try:
            task = Task(task_id="t", prompt_id="p", prompt="What is 1+1?", answer="2", row=row, keep=True)
            return await played(runner, task)
        finally:
            await runner.close()
            await parts.close()

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
    assert shown[-1].startswith(
        "failed: AgentFailed: the agent never called the model: 3 requests were refused: 3 × 404"
    )


def test_messages_are_shown_on_demand() -> None:
    shown = tried({"asks": ["2"]}, messages=True, reward="agent", agent={"function": "tests.support.agents:scripted"})
    assert shown[1:3] == ["request 0, user: What is 1+1?", "request 0, assistant: 2"]
    assert shown[-1].startswith("failed: ValueError: the agent gave no reward")


@pytest.mark.parametrize(
    ("agent", "arguments", "message"),
    [
        (None, (), "episode.agent is not set"),
        ("tests.support.agents:scripted", ("--row", "2"), "--row 2: data.train has 2 prompts with an agent, which"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_tried_is_refused(
    tmp_path: Path, spo: Spo, agent: str | None, arguments: tuple[str, ...], message: str
) -> None:
    data, config = tmp_path / "data.jsonl", tmp_path / "run.yaml"
    data.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in ("1+1?", "3-1?")))
    tree = {"model": {"path": "m"}, "data": {"train": str(data)}, "episode": {"agent": agent} if agent else {}}
    config.write_text(json.dumps(tree))
    ran = spo("agent", "try", config, *arguments)
    assert ran.returncode == 2, ran.stderr
    assert message in ran.stderr.splitlines()[-1]
