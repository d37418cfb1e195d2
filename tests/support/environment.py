"""A stand-in for an environment server of `verifiers`, which gives recorded answers of the real one, or misbehaves."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from generator.agents.environment import EnvironmentServer
from generator.agents.programs import AgentTask
from tests.support.agents import agent_task, scripted

# What `verifiers` 0.4.0 answered, by what happened: health, played, model away, other row, cancelled.
RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "environment_server.json").read_text())
ROW = RECORDED["played"]["request"]["task_data"]
BASE_URL = RECORDED["played"]["request"]["client"]["base_url"]


class Call:
    def __init__(self, server: StandIn, client: bytes, number: bytes, method: str, content: Any) -> None:
        self.server, self.client, self.number, self.method, self.content = server, client, number, method, content

    async def send(self, kind: str, content: Any) -> None:
        await self.send_bytes(kind.encode(), msgpack.packb(content))

    async def send_bytes(self, *frames: bytes, number: bool = True) -> None:
        assert self.server.socket is not None
        await self.server.socket.send_multipart([self.client, *([self.number] if number else []), *frames])

    async def replay(self, name: str, first: int = 0, last: int | None = None) -> None:
        for kind, content in RECORDED[name]["messages"][first:last]:
            await self.send(kind, content)


Behaviour = Callable[[Call], Coroutine[Any, Any, None]]


def replays(name: str) -> Behaviour:
    return lambda call: call.replay(name)


def says(*messages: tuple[str, Any]) -> Behaviour:
    async def behave(call: Call) -> None:
        for kind, content in messages:
            await call.send(kind, content)

    return behave


def asked(call: Call) -> AgentTask:
    key = call.content["client"]["base_url"].split("/")[-2]
    return agent_task(Path(), api_key=key, row=call.content["task_data"])


async def scores(call: Call) -> None:
    """Plays as the row says, with the session that the address names; what this returns is the reward."""
    try:
        reward = await scripted(asked(call))
        await call.send("delta", {"trace": "t", "set": {"rewards": {"right": {"score": reward, "weight": 1.0}}}})
        await call.send("reply", {"success": True, "head": {"ok": True}, "traces": [{"id": "t"}]})
    except ValueError as error:
        failed = {"ok": False, "errors": [{"type": "TaskError", "message": str(error)}]}
        await call.send("reply", {"success": True, "head": failed, "traces": []})


async def dies(call: Call) -> None:
    """Plays as the row says, and ends without an answer."""
    await scripted(asked(call))
    call.server.die()


@contextmanager
def nowhere() -> Iterator[str]:
    """An address at which nothing listens until the block ends."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{taken.getsockname()[1]}"


class StandIn:
    """Answers health requests as the real server does, and others as told; `calls` are the others, in order."""

    def __init__(self, run: Behaviour, health: Behaviour | None = None, address: str = "tcp://127.0.0.1:*") -> None:
        self.run, self.health = run, health or replays("health")
        self.calls: asyncio.Queue[Call] = asyncio.Queue()
        self.socket: zmq.asyncio.Socket | None = None
        self.address = address
        self._runs: list[asyncio.Future[None]] = []

    async def __aenter__(self) -> StandIn:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.socket.linger = 0
        while True:
            try:
                self.socket.bind(self.address)
                break
            except zmq.ZMQError as error:  # a server that died gives its port back in a thread of ZeroMQ
                if error.errno != zmq.EADDRINUSE:
                    raise
                await asyncio.sleep(0.01)
        self.address = self.socket.last_endpoint.decode()
        self._serving = asyncio.create_task(self._serve(self.socket))
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [self._serving, *self._runs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.socket is not None:
            self.die()

    def die(self) -> None:
        """Close the connections, as the end of its process would."""
        assert self.socket is not None
        self._serving.cancel()
        self.socket.close()
        self.socket = None

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            client, number, method, content = await socket.recv_multipart()
            call = Call(self, client, number, method.decode(), msgpack.unpackb(content))
            if call.method == "health":
                await self.health(call)
                continue
            self.calls.put_nowait(call)
            if call.method == "run":
                self._runs.append(asyncio.create_task(self.run(call)))


def task(**row: Any) -> AgentTask:
    """The task that was recorded, with changes of its row."""
    return agent_task(Path(), row=ROW | row, base_url=BASE_URL)


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[EnvironmentServer]:
    client = EnvironmentServer(address)
    try:
        yield client
    finally:
        await client.close()


async def play_on(run: Behaviour) -> float:
    async with StandIn(run) as server, client_of(server.address) as client:
        return await client.run(task())
