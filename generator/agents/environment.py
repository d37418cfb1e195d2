"""A client of `verifiers` 0.4 environment servers, which play a task with their own agent and score it.

Requests and replies are msgpack maps over ZeroMQ: [id, method, request] is answered by any number of [id, `delta`,
changes] and then one [id, `reply`, result]. The server has no data set: a request carries the whole row of the task.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from functools import partial
from typing import Annotated, Any

import msgpack
import zmq
import zmq.asyncio
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from zmq.utils.monitor import recv_monitor_message

from common.config import Config
from common.errors import UserError
from common.messages import MAX_PARTS, Failure, first_problem
from common.network import excerpt, host_of, is_this_machine
from common.unpack import MAX_BYTES, Unreadable, unpack
from generator.agents.programs import AgentFailed, AgentTask
from generator.concurrency import offload

VERIFIERS = "0.4"  # the version of verifiers whose protocol this client speaks
START_SECONDS = 120.0  # that a starting generator waits for the server
ANSWER_SECONDS = 5.0  # for an answer to a health check, before it is repeated
CONNECT_SECONDS = 30.0  # that a task waits for a lost server to return
HANDSHAKE_SECONDS = 10.0
PING_SECONDS, SILENT_SECONDS = 5.0, 30.0  # libzmq's own thread answers pings, however busy the server is
QUEUED = 64  # messages that wait here to be read
LONG_MESSAGE = 1 << 16  # bytes that are unpacked in a thread
MAX_TRACES = 256  # agents of one episode
# The server reads API keys only from its own environment, so the key is in the address; this variable is never set.
NO_KEY = "SPO_KEY_IS_IN_THE_ADDRESS"

BROKE = "the connection broke: the server closed it or sent too long a message"
TROUBLES: dict[int, str] = {
    zmq.EVENT_CLOSED: "nothing listens there",
    zmq.EVENT_CONNECTED: "what listens there does not speak ZeroMQ",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the server there requires ZeroMQ authentication",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "a ZeroMQ server there does not answer",
}


class EnvironmentFailed(Exception):
    """The server is unreachable, failed, or broke the protocol; the episode says nothing about the model."""

    failure = Failure.ENVIRONMENT_FAILED


async def check_environments(config: Config, log: Any) -> None:
    """Wait for the environment servers that the run names; raises `UserError` if one is not ready."""
    agents = [episode.agent for episode in config.episodes_in_use().values() if episode.agent is not None]
    for address in {agent.environment for agent in agents if agent.environment is not None}:
        server = EnvironmentServer(address)
        try:
            await server.ready(log)
        finally:
            await server.close()


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class _Reward(_Part):
    score: FiniteFloat
    weight: FiniteFloat


class _Error(_Part):
    type: str
    message: str


class _Agent(_Part):
    name: str = "agent"
    trainable: bool = True


class _Trace(_Part):
    """One agent's part in an episode: the fields that are needed here, which a delta may change."""

    agent: _Agent = _Agent()
    rewards: dict[str, _Reward | None] = Field(default_factory=dict, max_length=MAX_PARTS)


class _Delta(_Part):
    trace: str
    discard: bool = False
    changes: Annotated[_Trace, Field(alias="set")] = _Trace()
    errors: list[_Error] = Field(default_factory=list)


class _Head(_Part):
    ok: bool
    errors: list[_Error] = Field(default_factory=list)


class _TraceId(_Part):
    id: str


class _Reply(_Part):
    success: bool
    error: str | None = None
    head: _Head | None = None
    traces: list[_TraceId] = Field(default_factory=list, max_length=MAX_TRACES)


class _Request:
    """A running request, and the traces received for it so far."""

    def __init__(self) -> None:
        self.reply: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self.traces: dict[str, _Trace] = {}
        self.error = ""  # the newest error of any trace

    def change(self, delta: _Delta) -> None:
        if delta.discard:
            self.traces.pop(delta.trace, None)
            return
        trace = self.traces.get(delta.trace, _Trace())
        new = {name: getattr(delta.changes, name) for name in delta.changes.model_fields_set}
        self.traces[delta.trace] = trace.model_copy(update=new)
        if len(self.traces) > MAX_TRACES:
            raise Unreadable(f"more than {MAX_TRACES} traces in one episode")
        if delta.errors:
            self.error = _shown(delta.errors[-1])

    def fail(self, reason: str) -> None:
        if not self.reply.done():
            self.reply.set_exception(EnvironmentFailed(reason))

    def reward(self, reply: _Reply) -> float:
        """The weighted sum of the environment's rewards.

        Raises:
            AgentFailed: the episode failed, or was not scored.
            EnvironmentFailed: the server refused the request, did not send a trace, or did not train exactly one agent.
        """
        if not reply.success or reply.head is None:
            raise EnvironmentFailed(excerpt(reply.error or "it sent no result, and no reason"))
        if not reply.head.ok:
            error = _shown(reply.head.errors[-1]) if reply.head.errors else self.error
            raise AgentFailed(f"the episode failed in the environment: {error or 'no reason given'}")
        try:
            traces = [self.traces[trace.id] for trace in reply.traces]
        except KeyError as error:
            raise EnvironmentFailed(f"it never sent the trace {error}") from None
        trained = [trace for trace in traces if trace.agent.trainable]
        if len(trained) != 1:
            names = ", ".join(sorted({trace.agent.name for trace in trained})) or "none"
            raise EnvironmentFailed(
                f"{len(trained)} agents of the episode are to be trained ({names[:200]}); a sample has one reward, so "
                "exactly one agent must be trainable"
            )
        rewards = trained[0].rewards
        values = [reward.score * reward.weight for reward in rewards.values() if reward is not None]
        if not values or len(values) < len(rewards):
            missing = ", ".join(name for name, reward in rewards.items() if reward is None) or "the task defines none"
            raise AgentFailed(f"no reward was computed ({missing[:200]})")
        return math.fsum(values)


def _shown(error: _Error) -> str:
    return excerpt(f"{error.type}: {error.message}")


class EnvironmentServer:
    """One connection to a server, for all episodes of an agent and for one event loop.

    If it breaks, running requests fail, since the server forgets them. The next request opens another connection, since
    messages that are sent while libzmq reconnects may be lost silently.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._requests: dict[bytes, _Request] = {}
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._trouble = ""

    async def ready(self, log: Any, seconds: float = START_SECONDS) -> None:
        """Wait for a server that is still starting; raises `UserError` if none answers within `seconds`."""
        named = f"episode.agent.environment = {self.address}"
        if not is_this_machine(host_of(self.address)):
            raise UserError(
                f"{named} is on another machine, which cannot reach this generator's model; start a server on each "
                "generator's machine, and name it as tcp://127.0.0.1:PORT"
            )
        waiting = False
        try:
            async with asyncio.timeout(seconds):
                while not await self._answers():
                    if not waiting:
                        log.warning("waiting for the environment server", address=self.address, reason=self._trouble)
                    waiting = True
                    await asyncio.sleep(min(1.0, seconds / 4))
        except TimeoutError:
            raise UserError(
                f"{named}: no environment server of verifiers {VERIFIERS} is ready within {seconds:g} s "
                f"({self._trouble}); start it, or correct the address (docs/environments.md)"
            ) from None

    async def run(self, task: AgentTask) -> float:
        """Have the server play a task, and return its reward; if this is cancelled, so is the episode.

        Args:
            task: its `row` is the whole row, as the environment's task set wrote it.

        Raises:
            AgentFailed: the episode failed in the environment, or was not scored.
            EnvironmentFailed: see the class.
        """
        client = {"type": "eval", "base_url": task.base_url, "api_key_var": NO_KEY}
        run = {"task_data": dict(task.row), "client": client, "model": task.model, "sampling": {}}
        request_id, request = await self._send(b"run", run)
        try:
            return request.reward(await request.reply)
        except EnvironmentFailed as error:
            raise EnvironmentFailed(f"the environment server at {self.address}: {error}") from None
        finally:
            self._requests.pop(request_id, None)
            if request.reply.cancelled() or request.reply.exception() is not None:
                self._cancel(request_id)

    async def close(self) -> None:
        tasks = self._tasks
        self._drop("it was closed")
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answers(self) -> bool:
        """Whether the server is healthy."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                request_id, request = await self._send(b"health", {})
                try:
                    return (await request.reply).success
                except EnvironmentFailed as error:
                    self._trouble = str(error)
                finally:
                    self._requests.pop(request_id, None)
        return False

    async def _send(self, method: bytes, content: dict[str, Any]) -> tuple[bytes, _Request]:
        socket = self._socket or self._open()
        request_id = uuid.uuid4().hex.encode()
        request = self._requests[request_id] = _Request()
        sent = False
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await socket.send_multipart([request_id, method, msgpack.packb(content)])
        except TimeoutError:
            raise EnvironmentFailed(
                f"the environment server at {self.address} cannot be reached ({self._trouble})"
            ) from None
        except asyncio.CancelledError:
            # Closing the socket cancels its sends: the connection broke, unless this task itself was cancelled.
            current = asyncio.current_task()
            if not socket.closed or (current is not None and current.cancelling()):
                raise
            raise EnvironmentFailed(f"the environment server at {self.address}: {BROKE}") from None
        else:
            sent = True
            return request_id, request
        finally:
            if not sent:
                del self._requests[request_id]
                if request.reply.done():
                    request.reply.exception()  # else asyncio logs that it was never retrieved

    def _cancel(self, request_id: bytes) -> None:
        """Ask the server, if it is there, to end a run whose result is no longer needed."""
        if self._socket is None:
            return
        frames = [uuid.uuid4().hex.encode(), b"cancel", msgpack.packb({"request_id": request_id.decode()})]
        with contextlib.suppress(zmq.ZMQError):  # the message would have to wait: the server is gone, or reads nothing
            zmq.Socket.shadow(self._socket).send_multipart(frames, zmq.DONTWAIT)

    def _open(self) -> zmq.asyncio.Socket:
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        socket.immediate = True  # nothing is queued for a server that is not there
        socket.ipv6 = "[" in self.address
        socket.maxmsgsize = MAX_BYTES  # per frame; a longer one ends the connection
        socket.rcvhwm = QUEUED
        socket.handshake_ivl = round(HANDSHAKE_SECONDS * 1000)
        socket.heartbeat_ivl, socket.heartbeat_timeout = round(PING_SECONDS * 1000), round(SILENT_SECONDS * 1000)
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 5000  # milliseconds
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | sum(TROUBLES))
        socket.connect(self.address)
        self._socket, self._trouble = socket, TROUBLES[zmq.EVENT_CLOSED]
        self._tasks = [asyncio.create_task(self._receive(socket)), asyncio.create_task(self._watch(monitor))]
        return socket

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or frames[1] not in (b"delta", b"reply"):
                self._fail(f"it does not speak the protocol of verifiers {VERIFIERS}")
                continue
            request = self._requests.get(frames[0])
            if request is None or request.reply.done():
                continue  # its run was given up earlier
            try:
                content = await offload(len(frames[2]) > LONG_MESSAGE, partial(_read, *frames[1:]))
                if isinstance(content, _Delta):
                    request.change(content)
                elif not request.reply.done():
                    request.reply.set_result(content)
            except Unreadable as error:
                request.fail(f"it sent something that is not a message of verifiers {VERIFIERS}: {error}")

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        connected = False
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            # Before the first handshake nothing was sent (`immediate`), and libzmq connects again by itself.
            if event == zmq.EVENT_DISCONNECTED and connected:
                self._drop(BROKE)
            connected = connected or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._trouble = TROUBLES.get(event, self._trouble)

    def _drop(self, reason: str) -> None:
        """Close the connection and fail its requests."""
        self._fail(reason)
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close()
            self._socket = None

    def _fail(self, reason: str) -> None:
        for request in self._requests.values():
            request.fail(reason)


def _read(kind: bytes, data: bytes) -> _Delta | _Reply:
    """A message of the server; raises `Unreadable`."""
    content = unpack(data, strict_map_key=False)
    try:
        return _Delta.model_validate(content) if kind == b"delta" else _Reply.model_validate(content)
    except ValidationError as error:
        raise Unreadable(f"{kind.decode()}: {first_problem(error)}") from None
