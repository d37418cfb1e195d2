"""A server that follows SandboxFusion's `/run_code` or breaks it as a test says, and calls of SandboxClient against it.

It speaks HTTP by hand, because a library's server cannot be made to misbehave.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from sandbox_client import RunCodeRequest, SandboxClient, SandboxUnavailable

Reply = Callable[["SandboxDouble", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
QUICK = RunCodeRequest(code="print(89)", compile_timeout=0.01, run_timeout=0.01)


def result(**fields: Any) -> dict[str, Any]:
    """An answer with all published fields, and some of a later version; `run_status` is the status of the run."""
    run = {"status": fields.pop("run_status", "Finished"), "execution_time": 0.0123, "peak_memory_MB": 12.5}
    run |= {"return_code": fields.pop("return_code", 0), "stdout": fields.pop("stdout", "89\n"), "stderr": ""}
    answer = {"status": "Success", "message": "", "compile_result": None, "run_result": run, "trace_id": "7f"}
    return answer | {"executor_pod_name": None, "files": {}} | fields


def sends(content: bytes) -> Reply:
    """Bytes as they are, and then the end of the connection."""

    async def reply(_: SandboxDouble, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(content)
        await writer.drain()
        writer.close()

    return reply


def says(content: bytes, status: int = 200, kind: str = "application/json", **headers: str) -> Reply:
    """A complete HTTP answer, on a connection that stays open."""
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()]
    head = f"HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n{''.join(lines)}\r\n"

    async def reply(_: SandboxDouble, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head.encode() + content)
        await writer.drain()

    return reply


def answers(**fields: Any) -> Reply:
    return says(json.dumps(result(**fields)).encode())


async def resets(_: SandboxDouble, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """TCP reset instead of an answer."""
    writer.transport.abort()


async def hangs(_: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Does not answer until the client gives up."""
    assert await reader.read(1) == b""
    writer.close()


class SandboxDouble:
    """Plays `replies` one a request, the last one again and again.

    Attributes:
        requests, headers: of all requests.
        accepted: connections so far; `most_open`: most requests under way at a time.
        gate: requests wait for it; it is open at first.
    """

    def __init__(self, *replies: Reply, port: int = 0) -> None:
        self.replies = list(replies) or [answers()]
        self.port = port
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.accepted = self.open = self.most_open = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._handlers: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> SandboxDouble:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self.all_gone()

    async def all_gone(self) -> None:
        """Wait until the client has closed every connection."""
        while self._handlers:
            await asyncio.wait(self._handlers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                await self._take(reader)
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                try:
                    await self.gate.wait()
                    reply = self.replies[min(len(self.requests), len(self.replies)) - 1]
                    await reply(self, reader, writer)
                finally:
                    self.open -= 1
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _take(self, reader: asyncio.StreamReader) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        assert first == "POST /run_code HTTP/1.1"
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines if line)}
        self.requests.append(json.loads(await reader.readexactly(int(headers["content-length"]))))
        self.headers.append(headers)


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


def client(server: SandboxDouble, time: Time | None = None, **options: Any) -> SandboxClient:
    time = time or Time()
    return SandboxClient(server.url, clock=time.clock, sleep=time.sleep, **options)


def run(test: Coroutine[Any, Any, Any]) -> Any:
    """Run a test; a task that is left behind fails it."""

    async def alone() -> Any:
        value = await test
        for _ in range(10):  # generators that were not read to their end are closed by the loop
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return value

    return asyncio.run(alone())


async def outcome(*replies: Reply, request: RunCodeRequest = QUICK, **options: Any) -> tuple[Any, SandboxDouble, Time]:
    """(response or exception, server, time) of one call."""
    moment = Time()
    async with SandboxDouble(*replies) as server, client(server, moment, **options) as sandbox:
        try:
            return await sandbox.run_code(request), server, moment
        except SandboxUnavailable as error:
            return error, server, moment
