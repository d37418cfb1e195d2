"""`spo-sandbox` as a process: how it starts, what it says, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest
import uvicorn

from common.network import bound
from sandbox_client import RunCodeRequest, SandboxClient, Status
from sandbox_client.server import Service
from sandbox_client.strangers import HEADER_BYTES, Strangers
from tests.support.sandbox import FOREVER, Loop, Server, until

pytestmark = pytest.mark.usefixtures("bubblewrap")

TOKEN = {"Authorization": "Bearer the-token"}


async def metric(client: httpx.AsyncClient, name: str) -> float:
    text = (await client.get("/metrics", headers=TOKEN)).text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"spo_sandbox_{name} "))


async def wait_for(client: httpx.AsyncClient, name: str, value: float) -> None:
    """Wait until a metric has a value."""
    deadline = time.monotonic() + 120
    while await metric(client, name) != value:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def post(client: httpx.AsyncClient, code: str, **values: Any) -> asyncio.Task[httpx.Response]:
    body = {"code": code, "run_timeout": 60, **values}
    return asyncio.create_task(client.post("/run_code", json=body, headers=TOKEN, timeout=120))


def test_a_server_s_life(loop: Loop) -> None:
    """It says that it is isolated, asks for the token, kills what nobody waits for, and ends what runs when told to."""
    server = Server("--workers", "1", "--queue", "0", "--grace", "60", environment={"SPO_SANDBOX_TOKEN": "the-token"})
    assert [line["event"] for line in server.log] == ["isolation checked", "listening"]

    async def live() -> None:
        client = SandboxClient(server.url, token="the-token")
        answer = await client.run_code(RunCodeRequest(code="print(1)", run_timeout=60))
        assert answer.status is Status.SUCCESS
        await client.close()
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.post("/run_code", json={"code": ""})).status_code == 401
            assert (await post(client, "x", language="cobol")).status_code == 422
            left = post(client, FOREVER)
            await wait_for(client, "running", 1)
            assert (await post(client, "print(1)")).status_code == 503
            left.cancel()
            await wait_for(client, "running", 0)
            last = post(client, "import time; time.sleep(1); print('done')")
            await wait_for(client, "running", 1)
            server.process.terminate()
            answer = await last
            assert answer.json()["run_result"]["stdout"] == "done\n"

    loop.wait(live())
    assert server.stop() == 0
    assert server.log[-1]["event"] == "stopped"


def test_a_program_that_does_not_end_is_killed_when_the_server_stops(loop: Loop) -> None:
    server = Server("--workers", "1", "--grace", "0.2", environment={"SPO_SANDBOX_TOKEN": "the-token"})
    process = psutil.Process(server.process.pid)

    async def live() -> list[psutil.Process]:
        async with httpx.AsyncClient(base_url=server.url) as client:
            running, waiting = post(client, FOREVER), post(client, FOREVER)
            await wait_for(client, "queued", 1)
            family = process.children(recursive=True)
            server.process.terminate()
            for answer in (await waiting, await running):
                assert (answer.status_code, answer.json()["detail"]) == (503, "this sandbox is stopping")
        return family

    family = loop.wait(live())
    assert server.stop() == 0
    assert not any(one.is_running() for one in family)


def test_half_sent_requests_without_the_token_keep_nobody_out(loop: Loop) -> None:
    server = Server("--workers", "1", "--queue", "0", environment={"SPO_SANDBOX_TOKEN": "the-token"})
    address = ("127.0.0.1", httpx.URL(server.url).port)
    half_sent = (
        b"POST /run_code HTTP/1.1\r\nHost: sandbox\r\nAuthorization: Bea",
        b"POST /run_code HTTP/1.1\r\nHost: sandbox\r\nContent-Length: 1000000\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nHost: sandbox\r\nContent-Length: 1000000\r\n\r\n",
        b"",
    )
    strangers = [socket.create_connection(address) for _ in range(200)]
    for number, stranger in enumerate(strangers):
        stranger.sendall(half_sent[number % len(half_sent)])

    async def run() -> Status:
        async with SandboxClient(server.url, token="the-token", attempts=1) as client:
            return (await client.run_code(RunCodeRequest(code="print(1)", run_timeout=60))).status

    assert loop.wait(run()) is Status.SUCCESS
    # The first were cut off for those that came after.
    with pytest.raises(ConnectionResetError):
        strangers[0].recv(1)
    for stranger in strangers:
        stranger.close()
    assert server.stop() == 0


@asynccontextmanager
async def guarded(strangers: Strangers) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a service that asks for a token."""
    service = Service(None, None, concurrency=1, queue=0, max_bytes=1000, token="right")  # type: ignore[arg-type]
    configured = uvicorn.Config(
        service.app(),
        http=strangers.protocol(),
        h11_max_incomplete_event_size=HEADER_BYTES,
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(configured)
    with bound("127.0.0.1", 0) as listener:
        listener.listen()
        serving = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        yield reader, writer
        writer.close()
        server.should_exit = True
        await serving


def test_who_is_not_admitted_in_time_is_cut_off_whatever_it_sends(loop: Loop) -> None:
    async def dribble(strangers: Strangers) -> bool:
        async with guarded(strangers) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost: sandbox\r\n\r\n")
            answered = b"200" in await reader.readline()
            with contextlib.suppress(ConnectionError):
                while await asyncio.wait_for(reader.read(1), 120):
                    writer.write(b"G")
            return answered and not strangers.waiting

    assert loop.wait(dribble(Strangers(patience=0.2)))


def test_who_has_shown_the_token_is_no_stranger(loop: Loop) -> None:
    strangers = Strangers(most=1)

    async def ask() -> tuple[bytes, bool]:
        async with guarded(strangers) as (reader, writer):
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: sandbox\r\nAuthorization: Bearer right\r\n\r\n")
            return await reader.readline(), bool(strangers.waiting)

    assert loop.wait(ask()) == (b"HTTP/1.1 200 OK\r\n", False)


def test_headers_are_bounded(loop: Loop) -> None:
    async def ask() -> bytes:
        async with guarded(Strangers()) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nX: " + b"x" * 2 * HEADER_BYTES)
            return await reader.readline()

    assert loop.wait(ask()) == b"HTTP/1.1 400 Bad Request\r\n"


def test_a_killed_server_leaves_no_program(loop: Loop) -> None:
    server = Server("--workers", "1", environment={"SPO_SANDBOX_TOKEN": "the-token"})
    process = psutil.Process(server.process.pid)

    async def live() -> list[psutil.Process]:
        async with httpx.AsyncClient(base_url=server.url) as client:
            running = post(client, FOREVER)
            await until(lambda: len(process.children(recursive=True)) >= 4)
            family = process.children(recursive=True)
            server.process.kill()
            with pytest.raises(httpx.TransportError):
                await running
        return family

    assert psutil.wait_procs(loop.wait(live()), timeout=60)[1] == []
    server.stop()


def test_without_isolation_it_says_so_loudly(loop: Loop) -> None:
    server = Server("--workers", "1", "--without-isolation")
    assert (server.log[0]["level"], server.log[0]["event"][:12]) == ("warning", "NOT ISOLATED")
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "isolated": False}
    assert server.stop() == 0


def test_it_does_not_start_where_it_cannot_isolate() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sandbox_client.cli", "--port", "0", "--bwrap", "/bin/true"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: programs cannot be isolated here")
    assert done.stderr.count("\n") == 1


def test_the_command_does_not_load_torch() -> None:
    code = (
        "import sys, sandbox_client.cli; sys.exit(bool({'torch', 'vllm', 'transformers', 'redis'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
