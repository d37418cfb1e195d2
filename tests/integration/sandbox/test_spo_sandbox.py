"""`spo-sandbox` as a process: how it starts, what it says, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from typer.testing import CliRunner

from common.connections import HEADER_BYTES, Connections
from common.errors import UserError
from common.network import bound
from sandbox_client import RunCodeRequest, SandboxClient, Status
from sandbox_client.cli import app
from sandbox_client.server import SandboxService
from sandbox_client.settings import Settings
from tests.support.event_loop import in_event_loop
from tests.support.sandbox import FOREVER, SandboxServer, SandboxUnderTest
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("bubblewrap")

TOKEN = {"Authorization": "Bearer the-token"}


async def wait_for(client: httpx.AsyncClient, name: str, value: float) -> None:
    while f"spo_sandbox_{name} {value}\n" not in (await client.get("/metrics", headers=TOKEN)).text:
        await asyncio.sleep(0.01)


def post(client: httpx.AsyncClient, code: str, **values: Any) -> asyncio.Task[httpx.Response]:
    body = {"code": code, "run_timeout": 60, **values}
    return asyncio.create_task(client.post("/run_code", json=body, headers=TOKEN, timeout=600))


@in_event_loop
async def test_a_server_s_life() -> None:
    """It says that it is isolated, asks for the token, kills what has no caller, and finishes what runs at SIGTERM."""
    server = SandboxServer("workers=1", "queue=0", "grace=60", token="the-token")
    assert [line["event"] for line in server.log if line["level"] == "info"] == ["isolation checked", "listening"]
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.post("/run_code", json={"code": ""})).status_code == 401
        assert (await post(client, "x", language="cobol")).status_code == 422
        left = post(client, FOREVER)
        await wait_for(client, "running", 1.0)
        assert (await post(client, "print(1)")).status_code == 503
        left.cancel()
        await wait_for(client, "running", 0.0)
        last = post(client, "import time; time.sleep(1); print('done')")
        await wait_for(client, "running", 1.0)
        server.process.terminate()
        assert (await last).json()["run_result"]["stdout"] == "done\n"
    assert server.stop() == 0
    assert server.log[-1]["event"] == "stopped"


@pytest.mark.parametrize("killed", [False, True])
@in_event_loop
async def test_no_program_outlives_its_server(killed: bool) -> None:
    server = SandboxServer("workers=1", "grace=0.2", token="the-token")
    process = psutil.Process(server.process.pid)
    async with httpx.AsyncClient(base_url=server.url) as client:
        running, waiting = post(client, FOREVER), post(client, FOREVER)
        await wait_for(client, "queued", 1.0)
        await until(lambda: len(process.children(recursive=True)) >= 5)  # keeper, worker, bubblewrap twice, program
        family = process.children(recursive=True)
        (server.process.kill if killed else server.process.terminate)()
        for answer in await asyncio.gather(waiting, running, return_exceptions=True):
            if killed:
                assert isinstance(answer, httpx.TransportError)
            else:
                assert isinstance(answer, httpx.Response)
                assert (answer.status_code, answer.json()["detail"]) == (503, "this sandbox is stopping")
    assert killed or server.process.wait(timeout=600) == 0
    assert psutil.wait_procs(family, timeout=600)[1] == []
    server.stop()


def test_half_sent_requests_without_the_token_block_no_client(http: SandboxUnderTest) -> None:
    assert isinstance(http.sandbox, SandboxClient)
    half_sent = (
        b"POST /run_code HTTP/1.1\r\nHost: sandbox\r\nAuthorization: Bea",
        b"POST /run_code HTTP/1.1\r\nHost: sandbox\r\nContent-Length: 1000000\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nHost: sandbox\r\nContent-Length: 1000000\r\n\r\n",
        b"",
    )
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", httpx.URL(http.sandbox._url).port)
        others = [stack.enter_context(socket.create_connection(address)) for _ in range(200)]
        for number, other in enumerate(others):
            other.sendall(half_sent[number % len(half_sent)])
        assert http.run(RunCodeRequest(code="print(1)", run_timeout=60)).status is Status.SUCCESS
        # The first were cut off for those that came after, by a reset where the server had not read all they sent.
        with contextlib.suppress(ConnectionResetError):
            assert others[0].recv(1) == b""


@asynccontextmanager
async def guarded(admission: Connections) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a service that asks for a token."""
    service = SandboxService(None, Settings(), "right", None)  # type: ignore[arg-type]
    options: dict[str, Any] = {"lifespan": "off", "log_config": None}
    server = uvicorn.Server(uvicorn.Config(service.app(), http=admission.protocol(), **options))
    with bound("127.0.0.1", 0) as listener:
        listener.listen()
        serving = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        yield reader, writer
        writer.close()
        server.should_exit = True
        await serving


@in_event_loop
async def test_a_connection_not_admitted_in_time_is_cut_off() -> None:
    admission = Connections(patience=0.2)
    async with guarded(admission) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: sandbox\r\n\r\n")
        assert b"200" in await reader.readline()
        with contextlib.suppress(ConnectionError):
            while await asyncio.wait_for(reader.read(1), 120):
                writer.write(b"G")
        assert not admission.waiting


CHUNKED = b"POST /run_code HTTP/1.1\r\nAuthorization: Bearer right\r\nTransfer-Encoding: chunked\r\n\r\n"
BAD = b"HTTP/1.1 400 Bad Request\r\n"


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: sandbox\r\nAuthorization: Bearer right\r\n\r\n", b"HTTP/1.1 200 OK\r\n"),
        (b"GET /health HTTP/1.1\r\n" + b"X: x\r\n" * HEADER_BYTES, BAD),
        (CHUNKED + b"1;" + b"x" * 2 * HEADER_BYTES, BAD),
    ],
    ids=["token", "endless headers", "endless chunk line"],
)
@in_event_loop
async def test_the_token_admits_and_headers_are_bounded(request_: bytes, line: bytes) -> None:
    admission = Connections()
    async with guarded(admission) as (reader, writer):
        writer.write(request_)
        assert await reader.readline() == line
        assert b"200" not in line or not admission.waiting


def test_it_says_where_it_cannot_isolate_or_is_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPO_SANDBOX_TOKEN", raising=False)
    refused = CliRunner().invoke(app, ["--port", "0", "-o", "bwrap=/bin/true"])
    assert isinstance(refused.exception, UserError)
    assert str(refused.exception).startswith("programs cannot be isolated here")
    server = SandboxServer("workers=1", "isolated=false", "cgroup=none")
    warnings = [line["event"][:16] for line in server.log if line["level"] == "warning"]
    assert warnings == ["NOT ISOLATED: pr", "no control group", "no token: every "]
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "isolated": False}
    assert server.stop() == 0
