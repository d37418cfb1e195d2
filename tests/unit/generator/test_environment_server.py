"""The client of environment servers, against a stand-in that says what `verifiers` was recorded to say, or worse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.errors import UserError
from common.log import get_logger
from common.unpack import MAX_BYTES
from generator.agents import environment
from generator.agents.environment import EnvironmentFailed, EnvironmentServer
from generator.agents.programs import AgentFailed
from tests.support.environment import RECORDED, Behaviour, Call, StandIn, nowhere, play_on, replays, says, task
from tests.support.event_loop import in_event_loop

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


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[EnvironmentServer]:
    client = EnvironmentServer(address)
    try:
        yield client
    finally:
        await client.close()


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
DISCARDED = says(
    ("delta", FIRST), ("delta", {"trace": "first", "discard": True}), *map(tuple, RECORDED["played"]["messages"])
)


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
        (changed(head={"ok": False}), AgentFailed, FAILED_THERE + "it gives no reason"),
        (changed({"rewards": {"right": None}}), AgentFailed, "no reward was computed (right)"),
        (changed({"rewards": {}}), AgentFailed, "no reward was computed (its task has none)"),
        (replays("other row"), EnvironmentFailed, "Field required"),
        (sends(b"reply", b"\xc1"), EnvironmentFailed, "not msgpack"),
        (sends(b"delta", b"\x91" * 1000), EnvironmentFailed, "more than 100 deep"),
        (says(("reply", {"success": True})), EnvironmentFailed, "it gives no reason"),
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
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
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
async def test_a_server_that_is_away_fails_an_episode_and_one_that_starts_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with nowhere() as address:
        async with client_of(address) as client:
            with monkeypatch.context() as patch:
                patch.setattr(environment, "CONNECT_SECONDS", 0.3)
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
        (silent, "what listens there does not answer"),
        (sends(b"hello", number=False), "it does not speak the protocol of verifiers"),
        (says(("reply", {"success": True, "error": 7})), "reply: error"),
    ],
    ids=["nothing", "silence", "another protocol", "no health"],
)
@in_event_loop
async def test_a_start_without_a_server_is_one_line(
    health: Behaviour | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
async def test_a_server_that_does_not_speak_zeromq_is_told_from_an_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "ANSWER_SECONDS", 0.2)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    async with server, client_of(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        with pytest.raises(UserError, match="what listens there does not speak ZeroMQ"):
            await client.ready(get_logger(), 0.5)
    with pytest.raises(UserError, match="is on another machine"):
        await EnvironmentServer("tcp://192.0.2.7:5000").ready(get_logger())
