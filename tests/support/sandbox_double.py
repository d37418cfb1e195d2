"""A server that follows SandboxFusion's published `/run_code` to the letter, or breaks it as a test says.

It speaks HTTP by hand, because a well-made server cannot be made to misbehave.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

FIELDS = {
    "code": str,
    "language": str,
    "stdin": (str, type(None)),
    "compile_timeout": (int, float),
    "run_timeout": (int, float),
    "memory_limit_MB": int,
    "files": dict,
    "fetch_files": list,
}

Reply = Callable[["SandboxDouble", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def result(
    status: str = "Success",
    run_status: str = "Finished",
    return_code: int | None = 0,
    stdout: str | None = "89\n",
    **other: Any,
) -> dict[str, Any]:
    """An answer with all published fields, and some of a later version."""
    answer = {
        "status": status,
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": run_status,
            "execution_time": 0.0123,
            "return_code": return_code,
            "stdout": stdout,
            "stderr": "",
            "peak_memory_MB": 12.5,
        },
        "executor_pod_name": None,
        "files": {},
        "trace_id": "7f",
        "queue": {"waited": 0.1},
    }
    return answer | other


def says(content: bytes, status: int = 200, kind: str = "application/json", **headers: str) -> Reply:
    """A complete HTTP answer."""

    async def reply(double: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()]
        head = f"HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n{''.join(lines)}\r\n"
        writer.write(head.encode() + content)
        await writer.drain()

    return reply


def answers(**fields: Any) -> Reply:
    """A result."""
    return says(json.dumps(result(**fields)).encode())


def sends(content: bytes) -> Reply:
    """Bytes as they are, and then the end of the connection."""

    async def reply(double: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(content)
        await writer.drain()
        writer.close()

    return reply


async def resets(double: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """TCP reset instead of an answer."""
    writer.transport.abort()


async def hangs(double: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Nothing, until the client gives up."""
    assert await reader.read(1) == b""
    writer.close()


async def floods(double: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A result that never ends."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        await writer.drain()
        double.flooded += 65536


class SandboxDouble:
    """Plays `replies` one a request, the last one again and again.

    Attributes:
        requests, headers: what came in; bodies are checked against the published fields.
        wrong: how requests departed from the published format.
        accepted: connections so far; `connected`: open ones; `most_open`: most requests under way at a time.
    """

    def __init__(self, *replies: Reply, port: int = 0) -> None:
        self.replies = list(replies) or [answers()]
        self.port = port
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.wrong: list[str] = []
        self.accepted = self.open = self.most_open = self.flooded = 0
        self._handlers: set[asyncio.Task[Any]] = set()

    @property
    def connected(self) -> int:
        return len(self._handlers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def __aenter__(self) -> SandboxDouble:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        await self.all_gone()
        if error is None:
            assert self.wrong == []

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
                    reply = self.replies[min(len(self.requests), len(self.replies)) - 1]
                    await reply(self, reader, writer)
                finally:
                    self.open -= 1
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _take(self, reader: asyncio.StreamReader) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.split(": ", 1) for line in head[1:] if line)
        headers = {name.lower(): value for name, value in pairs}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.requests.append(body)
        self.headers.append(headers)
        if head[0] != "POST /run_code HTTP/1.1":
            self.wrong.append(head[0])
        if headers.get("content-type") != "application/json":
            self.wrong.append(f"content-type {headers.get('content-type')}")
        if body.keys() != FIELDS.keys():
            self.wrong.append(f"fields {sorted(body)}")
        self.wrong += [f"{name} = {body[name]!r}" for name in body if not isinstance(body[name], FIELDS[name])]
