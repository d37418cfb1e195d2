"""Of a task that is set aside people can read what was said until it failed, and why it did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.messages import SampleHeader
from common.payload import open_record
from common.streams.broker import Broker
from generator.engine.engine import Completion, EngineFailed
from launcher.episodes import view
from launcher.folder.episodes import record_of
from sampler.episode_files import Rollouts
from sampler.records import DispatchedTask
from tests.support.episode import TOKENIZER, call
from tests.support.generator import Rig

TURNS = {"tools": ["calculator"], "max_assistant_turns": 3}
SUM = call("calculator", '{"expression": "12*7"}') + "<|im_end|>"


def engine_that(rig: Rig, *turns: str | Exception) -> None:
    """The engine says or raises these, again for each attempt."""
    said = list(turns)

    async def generate(prompt_ids: Any, **limits: Any) -> Completion:
        said.append(turn := said.pop(0))
        if isinstance(turn, Exception):
            raise turn
        ids = np.asarray(TOKENIZER.encode(turn, add_special_tokens=False), np.int32)
        return Completion(ids, np.full(len(ids), -0.5, np.float32), [(0, 0, len(ids))], "stop")

    rig.engine.generate = generate  # type: ignore[method-assign]


def set_aside(
    broker: Broker, *turns: str | Exception, task: dict[str, Any] | None = None, **episode: Any
) -> SampleHeader:
    """The header of one task that fails in every attempt."""
    rig = Rig(broker, episode=TURNS | episode, data={"train": "t", "max_prompt_tokens": 200})
    engine_that(rig, *turns)
    rig.dispatch(1, **({"prompt": "What is 12*7?", "answer": "84"} | (task or {})))
    (header,) = rig.play(lambda rig: rig.headers(1))
    assert (header.status, header.reward) == ("set_aside", 0.0)
    return header


def story(header: SampleHeader) -> dict[str, Any]:
    assert header.record is not None
    return json.loads(open_record(header.record))


def test_what_was_said_before_the_engine_failed(fake_broker: Broker) -> None:
    header = set_aside(fake_broker, SUM, EngineFailed("out of blocks"), task={"keep": True})
    assert header.reason == "EngineFailed: out of blocks"
    told = story(header)
    assert (told["input"], told["gts"]) == ("What is 12*7?", "84")
    assert [(message["role"], message["content"]) for message in told["messages"][1:]] == [("tool", "84")]
    assert "token_ids" not in told  # nothing of it is trained on
    assert (header.turns, header.tool_calls) == (1, 1)
    assert header.tokens > header.model_tokens > 0


@pytest.mark.integration
def test_what_was_said_to_a_reward_that_failed(fake_broker: Broker) -> None:
    header = set_aside(fake_broker, "84<|im_end|>", reward="tests.support.some_rewards:broken")
    assert "KeyError" in header.reason
    assert story(header)["messages"] == [{"role": "assistant", "content": "84"}]


def test_an_episode_that_did_not_begin_leaves_its_reason_alone(fake_broker: Broker) -> None:
    header = set_aside(fake_broker, "84<|im_end|>", task={"prompt": "word " * 300})
    assert "data.max_prompt_tokens" in header.reason
    assert header.record is None


def test_where_nothing_is_kept_nothing_is_sent(fake_broker: Broker) -> None:
    assert set_aside(fake_broker, SUM, EngineFailed("x"), rollouts_every=0).record is None
    evaluated = set_aside(fake_broker, SUM, EngineFailed("x"), rollouts_every=0, task={"kind": "eval", "task_id": "e"})
    assert story(evaluated)["messages"]


def test_a_record_that_cannot_be_made_loses_no_task(fake_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> bytes:
        raise ValueError("odd")

    monkeypatch.setattr("generator.task_runner.make_record", fails)
    header = set_aside(fake_broker, SUM, EngineFailed("out of blocks"))
    assert (header.reason, header.record, header.turns) == ("EngineFailed: out of blocks", None, 1)


def test_spo_episodes_shows_reason_prompt_and_conversation(fake_broker: Broker, tmp_path: Path) -> None:
    header = set_aside(fake_broker, SUM, EngineFailed("out of blocks"))
    rollouts = Rollouts(tmp_path / "rollouts", every=10)
    task = DispatchedTask("p", False, 3, 0.5)
    assert rollouts.wants(task, header)
    rollouts.add(task, header, {"input": "never used"})
    rollouts.write()
    (line,) = (line for path in tmp_path.glob("rollouts/*.jsonl") for line in path.read_bytes().splitlines())
    text = "\n".join(line.plain for line in view.shown(record_of(line) or {}))
    for part in (
        "skipped: EngineFailed: out of blocks",
        "What is 12*7?",
        "tool  calculator",
        "1 turns, 1 tool calls",
    ):
        assert part in text
