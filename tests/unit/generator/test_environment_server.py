"""The client of environment servers, and its episodes, against a stand-in that says what `verifiers` says, or worse."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from common.config import Config
from common.errors import UserError
from common.log import get_logger
from common.unpack import MAX_BYTES
from generator.agents import environment
from generator.agents.environment import EnvironmentFailed, EnvironmentServer
from generator.agents.programs import AgentFailed
from generator.episode.episode import Episode
from tests.support.agents import agent_config, run_agent
from tests.support.environment import (
    RECORDED,
    Behaviour,
    Call,
    StandIn,
    client_of,
    dies,
    nowhere,
    play_on,
    replays,
    says,
    scores,
    task,
)
from tests.support.event_loop import cancelled, in_event_loop
from tests.support.waiting import until

LAST = RECORDED["played"]["messages"][-1][1]
TRACE = LAST["traces"][0]["id"]
SCORED = {"rewards": {"right": {"score": 1.0, "weight": 1.0}}}


def changed(changes: dict[str, Any] | None = None, **reply: Any) -> Any:
    """Says a delta with these changes of the trace, and then the recorded end, perhaps with other fields."""
    return says(("delta", {"trace": TRACE, "set": {**SCORED, **(changes or {})}}), ("reply", {**LAST, **reply}))


def sends(*frames: bytes, number: bool = True) -> Any:
    async def run(call: Call) -> None:
        await call.send_bytes(*frames, number=number)

    return run


@in_event_loop
async def test_a_request_and_its_reward_are_as_recorded() -> None:
    async with StandIn(replays("played")) as server, client_of(server.address) as client:
        assert await client.run(task()) == 1.0
        assert (await server.calls.get()).content == RECORDED["played"]["request"]


async def late(call: Call) -> None:
    """Answers a request that nobody waits for any more, before it answers this one."""
    for kind in (b"delta", b"reply"):
        await Call(call.server, call.client, b"given up", "run", None).send_bytes(kind, b"\xc1")
    await call.replay("played")


REWARDS = {"right": {"score": 1.0, "weight": 1.0}, "brief": {"score": 0.5, "weight": -0.2}}
FIRST = {"trace": "first", "set": {"rewards": {"right": {"score": 0.25, "weight": 1.0}}}}
PLAYED = map(tuple, RECORDED["played"]["messages"])
DISCARDED = says(("delta", FIRST), ("delta", {"trace": "first", "discard": True}), *PLAYED)


@pytest.mark.parametrize(
    ("run", "reward"),
    [(changed({"rewards": REWARDS}), 0.9), (DISCARDED, 1.0), (late, 1.0)],
    ids=["weights", "discarded attempt", "late answer"],
)
def test_rewards_are_added_and_answers_to_others_ignored(run: Behaviour, reward: float) -> None:
    assert asyncio.run(play_on(run)) == reward


FAILED_THERE = "the episode failed in the environment: "
TWO = says(
    ("delta", {"trace": TRACE, "set": SCORED}),
    ("delta", {"trace": "other", "set": SCORED}),
    ("reply", LAST | {"traces": [{"id": TRACE}, {"id": "other"}]}),
)
NOT_A_NUMBER = {"rewards": {"right": {"score": float("nan"), "weight": 1.0}}}


@pytest.mark.parametrize(
    ("run", "error", "reason"),
    [
        (replays("model away"), AgentFailed, FAILED_THERE + "ProviderError: All connection attempts failed"),
        (changed(head={"ok": False}), AgentFailed, FAILED_THERE + "no reason given"),
        (changed({"rewards": {"right": None}}), AgentFailed, "no reward was computed (right)"),
        (changed({"rewards": {}}), AgentFailed, "no reward was computed (the task defines none)"),
        (replays("other row"), EnvironmentFailed, "Field required"),
        (sends(b"reply", b"\xc1"), EnvironmentFailed, "not msgpack"),
        (sends(b"delta", b"\x91" * 1000), EnvironmentFailed, "more than 100 deep"),
        (says(("reply", {"success": True})), EnvironmentFailed, "it sent no result, and no reason"),
        (changed(NOT_A_NUMBER), EnvironmentFailed, "finite number"),
        (changed({"rewards": {str(i): None for i in range(300)}}), EnvironmentFailed, "at most 256"),
        (sends(b"hello", number=False), EnvironmentFailed, "does not speak the protocol of verifiers"),
        (changed(traces=[{"id": "other"}]), EnvironmentFailed, "never sent the trace 'other'"),
        (says(*(("delta", {"trace": str(i)}) for i in range(300))), EnvironmentFailed, "more than 256 traces"),
        (TWO, EnvironmentFailed, "2 agents of the episode are to be trained"),
        (sends(b"delta", bytes(MAX_BYTES + 1)), EnvironmentFailed, "the connection broke"),
    ],
)  # fmt: skip
def test_an_episode_without_a_reward_fails_with_a_reason(run: Behaviour, error: type[Exception], reason: str) -> None:
    with pytest.raises(error) as raised:
        asyncio.run(play_on(run))
    assert reason in str(raised.value)
    assert len(str(raised.value)) < 500
    assert error is AgentFailed or "the environment server at tcp://127.0.0.1:" in str(raised.value)


@in_event_loop
async def test_an_episode_that_nobody_waits_for_is_cancelled() -> None:
    async with StandIn(lambda call: call.replay("played", 0, 2)) as server, client_of(server.address) as client:
        playing = asyncio.create_task(client.run(task()))
        run = await server.calls.get()
        await cancelled(playing)
        cancel = await server.calls.get()
    assert (cancel.method, cancel.content) == ("cancel", {"request_id": run.number.decode()})


@in_event_loop
async def test_a_server_that_dies_fails_its_episodes_only() -> None:
    async with StandIn(lambda call: call.replay("played", 0, 3)) as server, client_of(server.address) as client:
        playing = asyncio.create_task(client.run(task()))
        await server.calls.get()
        server.die()
        with pytest.raises(EnvironmentFailed, match="the connection broke"):
            await playing
        async with StandIn(replays("played"), address=server.address):
            assert await client.run(task()) == 1.0


@in_event_loop
async def test_a_server_that_is_away_fails_an_episode_and_one_that_starts_is_waited_for(monkeypatch) -> None:
    with nowhere() as address:
        with monkeypatch.context() as patch:
            patch.setattr(environment, "CONNECT_SECONDS", 0.3)
            async with client_of(address) as client:
                with pytest.raises(EnvironmentFailed, match="cannot be reached .nothing listens there."):
                    await client.run(task())
        client = EnvironmentServer(address)
        waiting = asyncio.create_task(client.ready(get_logger()))
        await asyncio.sleep(0)
    async with StandIn(silent, address=address):
        await waiting
    await client.close()


async def silent(call: Call) -> None: ...


@pytest.mark.parametrize(
    ("health", "reason"),
    [
        (None, "nothing listens there"),
        (silent, "a ZeroMQ server there does not answer"),
        (sends(b"hello", number=False), "it does not speak the protocol of verifiers"),
        (says(("reply", {"success": True, "error": 7})), "reply: error"),
    ],
    ids=["nothing", "silence", "another protocol", "no health"],
)
@in_event_loop
async def test_a_start_without_a_server_is_one_line(health: Any, reason: str, monkeypatch) -> None:
    monkeypatch.setattr(environment, "ANSWER_SECONDS", 0.2)
    async with StandIn(silent, health) as server, client_of(server.address) as client:
        if health is None:
            server.die()
        with pytest.raises(UserError) as raised:
            await client.ready(get_logger(), 0.5)
    text = str(raised.value)
    assert text.startswith("episode.agent.environment = tcp://127.0.0.1:")
    assert text.endswith("; start it, or correct the address (docs/environments.md)")
    assert reason in text
    assert "\n" not in text


@in_event_loop
async def test_a_server_that_does_not_speak_zeromq_is_told_from_an_environments(monkeypatch) -> None:
    monkeypatch.setattr(environment, "ANSWER_SECONDS", 0.2)

    connected: set[asyncio.StreamWriter] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.add(writer)
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()
        connected.remove(writer)

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        async with client_of(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            with pytest.raises(UserError, match="what listens there does not speak ZeroMQ"):
                await client.ready(get_logger(), 0.5)
        await until(lambda: not connected)  # ZeroMQ closes them in a thread
    with pytest.raises(UserError, match="is on another machine"):
        await EnvironmentServer("tcp://192.0.2.7:5000").ready(get_logger())


ONCE = {"asks": ["2"]}


def config(server: StandIn, *sections: dict[str, Any], **episode: Any) -> Config:
    agent = {"environment": server.address, **episode.pop("agent", {})}
    return agent_config(*sections, **{"agent": agent, "reward": "agent", **episode})


async def played(run: Behaviour, row: dict[str, Any], *sections: Any, **episode: Any) -> tuple[Episode, Call]:
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
