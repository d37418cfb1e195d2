"""Parts for each source of the data: what sources share, and which of them a task is played with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.config import Config, parse_config
from common.errors import UserError
from common.messages import Task
from common.streams.broker import Broker
from generator import parts as module
from generator.parts import RunParts, UnknownSource
from tests.support.generator import Rig
from tests.support.process_sandbox import ProcessSandbox


def config(*train: dict[str, Any], heldout: Any = None, **episode: Any) -> Config:
    data = {"train": list(train), "heldout": heldout}
    return parse_config({"model": {"path": "m"}, "data": data, "episode": {"max_assistant_turns": 3} | episode})


def task(**fields: Any) -> Task:
    return Task(task_id="t", prompt_id="p", prompt="What is 3+4?", **fields)


def test_sources_with_equal_episodes_share_their_parts_and_equal_rewards_their_scorer() -> None:
    made = RunParts(
        config(
            {"path": "a.jsonl"},
            {"path": "b.jsonl", "system_prompt": "be brief"},
            {"path": "c.jsonl", "episode": {"max_response_tokens": 5}},
            {"path": "d.jsonl", "episode": {"reward": "boxed"}},
            heldout="a.jsonl",
        )
    )
    a, b, c, d = (made.by_source["train", name] for name in "abcd")
    assert a[1] is b[1] is made.by_source["heldout", "a"][1]
    assert (a[0].data.system_prompt, b[0].data.system_prompt) == (None, "be brief")
    assert c[1] is not a[1]
    assert c[1].scorer is a[1].scorer
    assert d[1].scorer is not a[1].scorer
    asyncio.run(made.close())


def test_one_sandbox_serves_all_sources_and_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ProcessSandbox] = []
    closed: list[ProcessSandbox] = []

    class Counted(ProcessSandbox):
        def __init__(self, _: Any) -> None:
            super().__init__()
            made.append(self)

        async def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(module, "make_sandbox", Counted)
    parts = RunParts(
        config(
            {"path": "a.jsonl", "episode": {"tools": ["code_interpreter"]}},
            {"path": "b.jsonl", "episode": {"reward": "code"}},
            {"path": "c.jsonl", "episode": {"reward": "code", "max_response_tokens": 5}},
        )
    )
    assert len(made) == 1
    asyncio.run(parts.close())
    assert set(closed) == set(made)


def test_a_task_is_played_by_its_source_on_its_side_of_the_data() -> None:
    parts = RunParts(config({"path": "a.jsonl"}, {"path": "b.jsonl"}, heldout="a.jsonl"))
    assert parts.find(task(source="a")) == ("train", "a")
    assert parts.find(task(source="b", kind="values")) == ("train", "b")
    assert parts.find(task(source="a", kind="eval")) == parts.find(task(kind="eval")) == ("heldout", "a")
    with pytest.raises(UnknownSource, match=r"source 'c'; data\.train has a, b"):
        parts.find(task(source="c"))
    with pytest.raises(UnknownSource, match="source ''"):
        parts.find(task())
    assert RunParts(config({"path": "a.jsonl"})).find(task(kind="eval")) == ("train", "a")


def test_parts_that_cannot_be_made_name_their_source() -> None:
    with pytest.raises(UserError, match=r"data\.train\[b\]: .*'exacts'"):
        RunParts(config({"path": "a.jsonl"}, {"path": "b.jsonl", "episode": {"reward": "exacts"}}))
    with pytest.raises(UserError, match=r"^episode\.reward"):
        RunParts(config({"path": "a.jsonl"}, reward="exacts"))


def test_a_generator_plays_and_scores_each_task_as_its_source_says(fake_broker: Broker) -> None:
    sources = [
        {"path": "exact.jsonl"},
        {"path": "tags.jsonl", "episode": {"reward": {"format": 0.25}, "reward_options": {"format": {"tags": ["7"]}}}},
        {"path": "brief.jsonl", "episode": {"max_response_tokens": 1}, "system_prompt": "a" * 10},
    ]
    rig = Rig(fake_broker, data={"train": sources, "max_prompt_tokens": 64})
    rig.dispatch(1, task_id="a", source="exact", answer="7")
    rig.dispatch(1, task_id="b", source="tags", answer="8")
    rig.dispatch(1, task_id="c", source="brief", answer="7")
    rig.dispatch(1, task_id="d", source="gone")
    headers = {header.task_id: header for header in rig.play(lambda rig: rig.headers(4))}
    assert (headers["a"].reward, headers["b"].reward, headers["b"].reward_parts) == (1.0, 0.25, {"format": 1.0})
    assert headers["c"].tokens > headers["a"].tokens, "its system prompt is in front"
    assert headers["d"].status == "set_aside"
    assert "source 'gone'; data.train has exact, tags, brief" in headers["d"].reason
