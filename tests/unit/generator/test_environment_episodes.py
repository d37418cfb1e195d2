"""Episodes in an environment server: the row that it gets, its reward, and failures that are never a reward."""

from __future__ import annotations

from typing import Any

import pytest

from common.config import Config
from generator.agents.environment import EnvironmentFailed
from generator.agents.programs import AgentFailed
from generator.episode.episode import Episode
from tests.support.agents import agent_config, run_agent
from tests.support.environment import Behaviour, Call, StandIn, dies, scores
from tests.support.event_loop import in_event_loop

ONCE = {"asks": ["2"]}


def config(server: StandIn, *sections: dict[str, Any], **episode: Any) -> Config:
    agent = {"environment": server.address, **episode.pop("agent", {})}
    return agent_config(*sections, **{"agent": agent, "reward": "agent", **episode})


async def played(
    run: Behaviour, row: dict[str, Any], *sections: dict[str, Any], **episode: Any
) -> tuple[Episode, Call]:
    async with StandIn(run) as server:
        return await run_agent(config(server, *sections, **episode), **row), await server.calls.get()


@in_event_loop
async def test_an_environment_gets_its_row_and_gives_the_reward() -> None:
    row = ONCE | {"returns": 0.25, "info": {"answer": "2", "level": 1}}
    columns = {"prompt_column": "question", "answer_column": "info.answer"}
    episode, call = await played(scores, row, {"data": {"train": "t.jsonl", **columns}})
    assert call.content["task_data"] == row | {"question": "What is 1+1?"}
    assert (episode.reason, episode.reward, episode.turns, episode.answer) == ("stop", 0.25, 1, "2")


@in_event_loop
async def test_an_episode_at_a_limit_is_cancelled_and_has_the_lowest_reward() -> None:
    async with StandIn(scores) as server:
        episode = await run_agent(config(server, max_seconds=0.2), **ONCE, waits=True)
        run, cancel = await server.calls.get(), await server.calls.get()
    assert (episode.reason, episode.reward, episode.turns) == ("max_seconds", 0.0, 1)
    assert (cancel.method, cancel.content) == ("cancel", {"request_id": run.number.decode()})


@in_event_loop
async def test_a_failed_episode_may_count_as_the_models() -> None:
    row = {**ONCE, "raises": "the model wrote nonsense"}
    with pytest.raises(AgentFailed, match="TaskError: the model wrote nonsense"):
        await played(scores, row)
    episode, _ = await played(scores, row, agent={"failure": 0.125})
    assert (episode.reason, episode.reward, episode.turns) == ("agent_failed", 0.125, 1)


@in_event_loop
async def test_a_dead_server_is_never_the_models_doing() -> None:
    with pytest.raises(EnvironmentFailed, match="the connection broke"):
        await played(dies, ONCE, agent={"failure": 0.125})
