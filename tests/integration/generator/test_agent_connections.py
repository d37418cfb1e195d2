"""The endpoint of agents on real connections, before an app of the test's own: what odd clients send is one answer."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog

from generator.agents.endpoint import Endpoint
from generator.agents.session import Session
from tests.support.agent_sessions import CHAT, Rig
from tests.support.episode import TEMPLATE
from tests.support.event_loop import in_event_loop

BODY = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
LENGTH = b"content-length: %d\r\n" % len(BODY)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Rig, Session, int]]:
    """An endpoint, a session of it, and its port."""
    rig = Rig()
    endpoint = Endpoint(rig.layer, TEMPLATE, 400, structlog.get_logger())
    await endpoint._serve()
    try:
        yield rig, rig.session(max_turns=1000, max_response_tokens=10_000), int(endpoint.url.rpartition(":")[2])
    finally:
        await endpoint.close()


def request(head: str, *headers: bytes, body: bytes = BODY) -> bytes:
    return head.encode() + b"\r\nhost: x\r\n" + b"".join(headers) + b"\r\n" + body


async def statuses(port: int, sent: bytes, count: int = 1) -> list[int]:
    """The statuses of the first answers on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    received, answers = b"", list[int]()
    while len(answers) < count and (piece := await reader.read(1 << 16)):
        received += piece
        answers = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", received)]
    writer.close()
    return answers


CASES = {
    "HTTP/1.0": ("POST {chat} HTTP/1.0", (b"KEY", LENGTH), BODY, 200, 1),
    "a target with a host": ("POST http://x{chat} HTTP/1.1", (b"KEY", LENGTH), BODY, 200, 1),
    "lengths that differ": ("POST {chat} HTTP/1.1", (b"KEY", LENGTH, b"content-length: 1\r\n"), BODY, 400, 0),
    "a length and chunks": ("POST {chat} HTTP/1.1", (b"KEY", LENGTH, b"transfer-encoding: chunked\r\n"),
                            b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), 400, 0),
    "a request in the body": ("POST {chat} HTTP/1.1", (b"KEY", b"content-length: 0\r\n"), BODY, 400, 0),
    "a line in a header": ("POST {chat} HTTP/1.1", (b"KEY", LENGTH, b"x: a\rauthorization: b\r\n"), BODY, 400, 0),
    "a header without end": ("POST {chat} HTTP/1.1", (b"KEY", b"x: " + b"a" * 70_000), b"", 400, 0),
    "a WebSocket": ("GET {chat} HTTP/1.1", (b"KEY", b"connection: upgrade\r\nupgrade: websocket\r\n",
                    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"), b"", 405, 0),
    "a tunnel": ("CONNECT x:80 HTTP/1.1", (b"KEY",), b"", 400, 0),
    "no HTTP": ("hello", (), b"", 400, 0),
}  # fmt: skip


@pytest.mark.parametrize(("head", "headers", "body", "answer", "asked"), CASES.values(), ids=CASES)
@in_event_loop
async def test_an_odd_request_is_one_answer(
    head: str, headers: tuple[bytes, ...], body: bytes, answer: int, asked: int
) -> None:
    async with served() as (rig, session, port):
        key = f"authorization: Bearer {session.key}\r\n".encode()
        sent = request(head.format(chat=CHAT), *(key if h == b"KEY" else h for h in headers), body=body)
        assert await statuses(port, sent) == [answer]
        assert (len(rig.app.forwarded), session.in_flight) == (asked, 0)


@in_event_loop
async def test_a_key_opens_no_later_request_of_its_connection() -> None:
    async with served() as (rig, session, port):
        key = f"x-api-key: {session.key}\r\n".encode()
        with_key, without = (request(f"POST {CHAT} HTTP/1.1", *k, LENGTH) for k in ((key,), ()))
        assert await statuses(port, with_key + without, 2) == [200, 401]
        assert len(rig.app.forwarded) == 1


@in_event_loop
async def test_requests_of_many_connections_at_once_are_answered() -> None:
    """All are connected before the server has read from one of them."""
    async with served() as (_, session, port):
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(120 * 3)]
        key = f"x-api-key: {session.key}\r\n".encode()
        loop, heard = asyncio.get_running_loop(), 0
        for start in range(0, len(connections), 120):
            some = connections[start : start + 120]
            for connection in some:
                connection.sendall(request(f"POST {CHAT} HTTP/1.1", key, LENGTH))
                connection.setblocking(False)
            replies = await asyncio.gather(*(loop.sock_recv(connection, 1 << 16) for connection in some))
            heard += sum(reply.startswith(b"HTTP/1.1 200") for reply in replies)
        for connection in connections:
            connection.close()
        assert heard == len(connections)
