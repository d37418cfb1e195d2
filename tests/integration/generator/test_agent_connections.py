"""The endpoint of agents on real connections, before an app of the test's own: what odd clients send is one answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog

from generator.agents.endpoint import Endpoint
from generator.agents.session import AgentSession, SessionLimits
from tests.support.agent_sessions import CHAT, Rig
from tests.support.episode import TEMPLATE
from tests.support.event_loop import within

BODY = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
LENGTH = b"content-length: %d\r\n" % len(BODY)


def opened(endpoint: Endpoint) -> AgentSession:
    return endpoint.open_session(SessionLimits(max_response_tokens=10_000, max_turns=1000))


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Rig, Endpoint, AgentSession]]:
    rig = Rig()
    endpoint = Endpoint(rig.layer, TEMPLATE, 400, structlog.get_logger())
    await endpoint._serve()
    try:
        yield rig, endpoint, opened(endpoint)
    finally:
        await endpoint.close()


in_endpoint = within(served, gives=3)


def request(head: str, *headers: bytes, body: bytes = BODY) -> bytes:
    return head.encode() + b"\r\nhost: x\r\n" + b"".join(headers) + b"\r\n" + body


def asks(session: AgentSession) -> bytes:
    return request(f"POST /s/{session.key}{CHAT} HTTP/1.1", LENGTH)


def port_of(endpoint: Endpoint) -> int:
    return int(endpoint.url.rpartition(":")[2])


async def statuses(endpoint: Endpoint, sent: bytes, count: int = 1) -> list[int]:
    """The statuses of the first answers on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(endpoint))
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
    "another path of the server": ("POST /v1/../tokenize HTTP/1.1", (b"KEY", LENGTH), BODY, 404, 0),
    "a path in disguise": ("POST /v1/chat%2Fcompletions%2F..%2F..%2F..%2Ftokenize HTTP/1.1", (b"KEY", LENGTH), BODY,
                           404, 0),
    "a tunnel": ("CONNECT x:80 HTTP/1.1", (b"KEY",), b"", 400, 0),
    "no HTTP": ("hello", (), b"", 400, 0),
}  # fmt: skip


@in_endpoint
async def test_an_odd_request_is_one_answer(rig, endpoint, session) -> None:
    key = f"authorization: Bearer {session.key}\r\n".encode()
    for name, (head, headers, body, answer, asked) in CASES.items():
        rig.app.prompts.clear()
        sent = request(head.format(chat=CHAT), *(key if h == b"KEY" else h for h in headers), body=body)
        assert await statuses(endpoint, sent) == [answer], name
        assert (len(rig.app.prompts), session.in_flight) == (asked, 0), name


@in_endpoint
async def test_a_key_opens_no_later_request_of_its_connection(rig, endpoint, session) -> None:
    key = f"x-api-key: {session.key}\r\n".encode()
    with_key, without = (request(f"POST {CHAT} HTTP/1.1", *k, LENGTH) for k in ((key,), ()))
    assert await statuses(endpoint, with_key + without, 2) == [200, 401]
    assert len(rig.app.prompts) == 1


@in_endpoint
async def test_requests_of_many_connections_at_once_are_answered(rig, endpoint, session) -> None:
    """All are connected before the server has read from one of them."""
    connections = [socket.create_connection(("127.0.0.1", port_of(endpoint))) for _ in range(240)]
    loop, heard = asyncio.get_running_loop(), 0
    for some in (connections[:120], connections[120:]):  # at most 128 requests of a session are in flight
        for connection in some:
            connection.sendall(asks(session))
            connection.setblocking(False)
        replies = await asyncio.gather(*(loop.sock_recv(connection, 1 << 16) for connection in some))
        heard += sum(reply.startswith(b"HTTP/1.1 200") for reply in replies)
    for connection in connections:
        connection.close()
    assert heard == len(connections)


FILES = 256  # that the generator may open, in the tests below: 32 connections of one owner or without a key, 64 in all


async def connected(endpoint: Endpoint, sent: bytes, count: int) -> list[Any]:
    """Connections, each of which sends something, and gets its answer if that is a whole request, before the next."""
    streams: list[Any] = []
    for _ in range(count):
        streams.append(await asyncio.open_connection("127.0.0.1", port_of(endpoint)))
        reader, writer = streams[-1]
        writer.write(sent)
        if sent.endswith(BODY):
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    return streams


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generator.agents.endpoint.raise_file_limit", lambda: FILES)


@pytest.mark.usefixtures("few_files")
@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nx-api-key: no"])
@in_endpoint
async def test_connections_without_a_key_are_few_and_stop_no_other(rig, endpoint, session, sent: bytes) -> None:
    streams = await connected(endpoint, sent, FILES)
    with contextlib.suppress(ConnectionResetError):
        assert await streams[0][0].read() == b""
    assert len(endpoint._connections.waiting) == FILES // 8
    await connected(endpoint, asks(session), 1)


@pytest.mark.usefixtures("few_files")
@in_endpoint
async def test_connections_of_a_session_and_of_all_are_bounded(rig, endpoint, session) -> None:
    sessions = [session, opened(endpoint), opened(endpoint)]
    kept = [await connected(endpoint, asks(one), 40) for one in sessions]
    held = {owner: len(group) for owner, group in endpoint._connections.owned.items()}
    assert held == {sessions[1].key: FILES // 8, sessions[2].key: FILES // 8}
    assert len(endpoint._connections.admitted) == FILES // 4
    assert sum(map(len, kept)) == 3 * 40


@in_endpoint
async def test_the_end_of_a_session_cuts_no_connection_that_another_goes_on_with(rig, endpoint, session) -> None:
    """Agents share a client, whose connections serve one task after another."""
    another = opened(endpoint)
    ((reader, writer),) = await connected(endpoint, asks(session), 1)
    await reader.readuntil(b"0\r\n\r\n")  # the end of the answer
    await endpoint.close_session(session)
    writer.write(asks(another))
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
