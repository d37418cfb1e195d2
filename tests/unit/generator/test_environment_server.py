"""The client of environment servers, against a stand-in that says what `verifiers` was recorded to say, or worse."""

from __future__ import annotations

import asyncio
import socket
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

LAST = RECORDED["played"]["messages"][-1][1]
TRACE = LAST["traces"][0]["id"]
SCORED = {"rewards": {"right": {"score": 1.0, "weight": 1.0}}}


def changed(changes: dict[str, Any] | None = None, **reply: Any) -> Any:
    """Says a delta with these changes of the trace, and then the recorded end, perhaps with other fields."""
    return says(("delta", {"trace": TRACE, "set": {**SCORED, **(changes or {})}}), ("reply", {**LAST, **reply}))


def test_a_recorded_episode_has_the_reward_of_the_environment() -> None:
    assert asyncio.run(play_on(replays("played"))) == 1.0


def test_a_request_is_what_the_server_was_recorded_to_take() -> None:
    async def scene() -> dict[str, Any]:
        async with StandIn(replays("played")) as server:
            client = EnvironmentServer(server.address)
            await client.run(task())
            await client.close()
            return dict((await server.calls.get()).content)

    assert asyncio.run(scene()) == RECORDED["played"]["request"]


def test_rewards_are_added_with_their_weights() -> None:
    rewards = {"right": {"score": 1.0, "weight": 1.0}, "brief": {"score": 0.5, "weight": -0.2}}
    assert asyncio.run(play_on(changed({"rewards": rewards}))) == 0.9


def test_an_attempt_that_the_server_discards_does_not_count() -> None:
    other = {"trace": "first", "set": {"rewards": {"right": {"score": 0.25, "weight": 1.0}}}}
    end = RECORDED["played"]["messages"]
    run = says(("delta", other), ("delta", {"trace": "first", "discard": True}), *map(tuple, end))
    assert asyncio.run(play_on(run)) == 1.0


UNSCORED = {
    "the model is away": (
        replays("model away"),
        "the episode failed in the environment: ProviderError: All connection attempts failed",
    ),
    "an error of the episode": (
        changed(head={**LAST["head"], "ok": False, "errors": [{"type": "EnvError", "message": "no\nbox"}]}),
        "the episode failed in the environment: EnvError: no box",
    ),
    "a reward that is missing": (changed({"rewards": {"right": None}}), "no reward was computed (right)"),
    "an error without a text": (
        changed(head={"ok": False}),
        "the episode failed in the environment: it gives no reason",
    ),
    "no rewards": (changed({"rewards": {}}), "no reward was computed (its task has none)"),
}


@pytest.mark.parametrize("case", UNSCORED)
def test_an_unscored_episode_has_a_reason(case: str) -> None:
    run, reason = UNSCORED[case]
    with pytest.raises(AgentFailed) as raised:
        asyncio.run(play_on(run))
    assert str(raised.value) == reason


def sends(*frames: bytes, number: bool = True) -> Any:
    async def run(call: Call) -> None:
        await call.send_bytes(*frames, number=number)

    return run


TWO = LAST | {"traces": [{"id": TRACE}, {"id": "other"}]}
RUBBISH = {
    "a row of another task set": (replays("other row"), "Field required"),
    "no reason": (says(("reply", {"success": False})), "it gives no reason"),
    "no msgpack": (sends(b"reply", b"\xc1"), "not msgpack"),
    "too deep": (sends(b"delta", b"\x91" * 1000), "more than 100 deep"),
    "a huge array": (sends(b"reply", b"\xdd\xff\xff\xff\xff"), "not msgpack"),
    "no map": (says(("reply", [1])), "reply"),
    "no head": (says(("reply", {"success": True})), "it gives no reason"),
    "a delta of nothing": (says(("delta", {"trace": 7})), "delta: trace"),
    "a reward that is a text": (changed({"rewards": {"right": {"score": "1", "weight": 1.0}}}), "rewards.right.score"),
    "a reward that is no number": (
        changed({"rewards": {"right": {"score": float("nan"), "weight": 1.0}}}),
        "finite number",
    ),
    "too many rewards": (changed({"rewards": {str(i): None for i in range(300)}}), "at most 256"),
    "one frame": (sends(b"hello", number=False), "does not speak the protocol of verifiers"),
    "another kind": (sends(b"news", b"\x80"), "does not speak the protocol of verifiers"),
    "a trace that never came": (changed(traces=[{"id": "other"}]), "never sent the trace 'other'"),
    "too many traces": (
        says(*(("delta", {"trace": str(i)}) for i in range(300))),
        "more than 256 traces",
    ),
    "two agents to train": (
        says(("delta", {"trace": TRACE, "set": SCORED}), ("delta", {"trace": "other", "set": SCORED}), ("reply", TWO)),
        "2 agents of the episode are to be trained",
    ),
    "no agent to train": (changed({"agent": {"name": "judge", "trainable": False}}), "0 agents"),
    "more than a message may have": (sends(b"delta", bytes(MAX_BYTES + 1)), "the connection broke"),
}


@pytest.mark.parametrize("case", RUBBISH)
def test_rubbish_is_a_failure_with_a_reason(case: str) -> None:
    run, reason = RUBBISH[case]
    with pytest.raises(EnvironmentFailed) as raised:
        asyncio.run(play_on(run))
    assert reason in str(raised.value)
    assert "the environment server at tcp://127.0.0.1:" in str(raised.value)
    assert len(str(raised.value)) < 500


def test_episodes_at_once_each_get_their_own_reward() -> None:
    async def scene() -> list[float]:
        waiting: list[Call] = []

        async def run(call: Call) -> None:
            waiting.append(call)
            if len(waiting) < 20:
                return
            for each in waiting:  # deltas of all, then the ends, the last first
                score = {"score": each.content["task_data"]["idx"] / 20, "weight": 1.0}
                await each.send("delta", {"trace": TRACE, "set": {"rewards": {"right": score}}})
            for each in reversed(waiting):
                await each.send("reply", LAST)

        async with StandIn(run) as server:
            client = EnvironmentServer(server.address)
            rewards = await asyncio.gather(*(client.run(task(idx=i)) for i in range(20)))
            await client.close()
            return rewards

    assert asyncio.run(scene()) == [i / 20 for i in range(20)]


def test_a_late_answer_to_another_request_is_ignored() -> None:
    async def run(call: Call) -> None:
        for kind in (b"delta", b"reply"):
            await Call(call.server, call.client, b"given up", "run", None).send_bytes(kind, b"\xc1")
        await call.replay("played")

    assert asyncio.run(play_on(run)) == 1.0


def test_an_episode_that_nobody_waits_for_is_cancelled() -> None:
    async def scene() -> tuple[Call, Call]:
        async with StandIn(lambda call: call.replay("played", 0, 2)) as server:
            client = EnvironmentServer(server.address)
            playing = asyncio.create_task(client.run(task()))
            run = await server.calls.get()
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            cancel = await server.calls.get()
            await client.close()
            return run, cancel

    run, cancel = asyncio.run(scene())
    assert (cancel.method, cancel.content) == ("cancel", {"request_id": run.number.decode()})


def test_a_server_that_dies_fails_its_episodes_only() -> None:
    async def scene() -> float:
        async with StandIn(lambda call: call.replay("played", 0, 3)) as server:
            client = EnvironmentServer(server.address)
            playing = [asyncio.create_task(client.run(task())) for _ in range(3)]
            for _ in playing:
                await server.calls.get()
            server.die()
            for each in await asyncio.gather(*playing, return_exceptions=True):
                assert isinstance(each, EnvironmentFailed)
                assert "the connection broke" in str(each)
            async with StandIn(replays("played"), address=server.address):
                try:
                    return await client.run(task())
                finally:
                    await client.close()

    assert asyncio.run(scene()) == 1.0


def test_a_server_that_is_away_fails_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        with nowhere() as address:
            client = EnvironmentServer(address)
            try:
                await client.run(task())
            finally:
                await client.close()

    monkeypatch.setattr(environment, "CONNECT_SECONDS", 0.3)
    with pytest.raises(EnvironmentFailed, match="is away .nothing listens there."):
        asyncio.run(scene())


async def silent(call: Call) -> None: ...


NOT_READY: dict[str, Any] = {
    "nothing": (None, "nothing listens there"),
    "no ZeroMQ": (b"", "what listens there does not speak ZeroMQ"),
    "a web server": (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 8, "it does not speak the protocol of verifiers"),
    "silence": (silent, "what listens there does not answer"),
    "another protocol": (sends(b"hello", number=False), "it does not speak the protocol of verifiers"),
    "no health": (says(("reply", {"success": True, "error": 7})), "reply: error"),
}


@pytest.mark.parametrize("case", NOT_READY)
def test_a_start_without_a_server_is_one_line(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listens, reason = NOT_READY[case]
    monkeypatch.setattr(environment, "ANSWER_SECONDS", 0.2)

    async def scene() -> None:
        async with listening(listens) as address:
            client = EnvironmentServer(address)
            try:
                await client.ready(get_logger(), 0.5)
            finally:
                await client.close()

    with pytest.raises(UserError) as raised:
        asyncio.run(scene())
    text = str(raised.value)
    assert text.startswith("episode.agent.environment = tcp://127.0.0.1:")
    assert text.endswith("; start it, or correct the address (docs/environments.md)")
    assert reason in text
    assert "\n" not in text


@asynccontextmanager
async def listening(listens: Behaviour | bytes | None) -> AsyncIterator[str]:
    """Address of a server that answers health so; of one that says these bytes; or of nothing."""
    if listens is None:
        with nowhere() as address:
            yield address
        return
    if not isinstance(listens, bytes):
        async with StandIn(silent, listens) as server:
            yield server.address
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        connections: list[socket.socket] = []

        async def serve() -> None:
            while True:
                connection, _ = await loop.sock_accept(listener)
                connections.append(connection)
                await loop.sock_sendall(connection, listens)

        serving = asyncio.create_task(serve())
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        serving.cancel()
        for connection in connections:
            connection.close()


def test_a_start_waits_for_a_server_that_is_starting() -> None:
    async def scene() -> None:
        with nowhere() as address:
            client = EnvironmentServer(address)
            waiting = asyncio.create_task(client.ready(get_logger()))
            await asyncio.sleep(0)
        async with StandIn(silent, address=address):
            await waiting
        await client.close()

    asyncio.run(scene())


def test_a_server_on_another_machine_is_refused() -> None:
    with pytest.raises(UserError, match="is another machine's"):
        asyncio.run(EnvironmentServer("tcp://192.0.2.7:5000").ready(get_logger()))
