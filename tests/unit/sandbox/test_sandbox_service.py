"""The server's answers, without a process: tokens, lengths, queues, counts; and the command's own mistakes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from common.errors import UserError
from common.network import bound, listen
from sandbox_client import RequestRefused, RunCodeRequest, RunCodeResponse, SandboxUnavailable, Status
from sandbox_client.cli import app, read_token
from sandbox_client.server import Service

Use = Callable[[httpx.AsyncClient, Service], Awaitable[None]]


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: str, **values: Any) -> None:
        self.lines.append((event, values))


class Held:
    """A sandbox whose programs end when they are told to."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.started: asyncio.Queue[str] = asyncio.Queue()
        self.killed: asyncio.Queue[str] = asyncio.Queue()

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        self.started.put_nowait(request.code)
        if request.code == "broken":
            raise SandboxUnavailable("no bubblewrap today")
        if request.language == "cobol":
            raise RequestRefused("no cobol here")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.killed.put_nowait(request.code)
            raise
        return RunCodeResponse(status=Status.SUCCESS, message=request.code)

    async def close(self) -> None: ...


def with_service(using: Use, **options: Any) -> None:
    """Run something against a service."""

    async def run() -> None:
        settings = {"concurrency": 1, "queue": 1, "max_bytes": 1000, **options}
        service = Service(Held(), Log(), **settings)
        transport = httpx.ASGITransport(service.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://sandbox") as client:
            async with asyncio.timeout(60):
                await using(client, service)

    asyncio.run(run())


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if not line.startswith("#")
    }


def test_what_is_no_request_is_refused_in_one_line() -> None:
    async def ask(client: httpx.AsyncClient, service: Service) -> None:
        for body, named in (
            (b"{", "request: Invalid JSON"),
            (b"[]", "request: "),
            (b"{}", "code: Field required"),
            (b'{"code": 1}', "code: Input should be a valid string"),
            (
                b'{"code": "", "run_timeout": -1, "files": {"a": 3}}',
                "run_timeout: Input should be greater than 0; files.a:",
            ),
            (b'{"code": "' + b"\xff" + b'"}', "request: Invalid JSON"),
        ):
            answer = await client.post("/run_code", content=body)
            assert answer.status_code == 422
            assert named in answer.json()["detail"]
            assert "\n" not in answer.json()["detail"]
        assert (await client.post("/run_code", content=b'{"code": "' + b"x" * 1000 + b'"}')).status_code == 413
        assert (await client.get("/run_code")).status_code == 405
        assert (await client.get("/nothing")).status_code == 404
        assert service.jobs == set()

    with_service(ask)


def test_a_request_that_this_sandbox_cannot_run_is_refused_and_not_counted() -> None:
    async def ask(client: httpx.AsyncClient, service: Service) -> None:
        answer = await client.post("/run_code", json={"code": "", "language": "cobol"})
        assert (answer.status_code, answer.json()) == (422, {"detail": "no cobol here"})
        assert (service.running, service.completed) == (0, 0)

    with_service(ask)


def test_the_token_is_asked_for_everywhere_but_at_health() -> None:
    async def ask(client: httpx.AsyncClient, service: Service) -> None:
        for path, method in (("/run_code", "POST"), ("/metrics", "GET")):
            for given in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "right"},
                {"Authorization": "Bearer ä"},
            ):
                sent = {name: value.encode() for name, value in given.items()}
                assert (await client.request(method, path, headers=sent, content=b"{}")).status_code == 401
        assert (await client.get("/health")).json() == {"status": "ok", "isolated": True}
        right = {"Authorization": "Bearer right"}
        assert (await client.get("/metrics", headers=right)).status_code == 200
        assert (await client.post("/run_code", headers=right, content=b"{}")).status_code == 422

    with_service(ask, token="right")


def test_what_does_not_run_waits_and_what_cannot_wait_is_sent_away() -> None:
    async def ask(client: httpx.AsyncClient, service: Service) -> None:
        held = service.sandbox
        assert isinstance(held, Held)
        first = asyncio.create_task(client.post("/run_code", json={"code": "first"}))
        assert await held.started.get() == "first"
        second = asyncio.create_task(client.post("/run_code", json={"code": "second"}))
        while not service.waiting:
            await asyncio.sleep(0)
        third = await client.post("/run_code", json={"code": "third"})
        assert (third.status_code, third.headers["Retry-After"]) == (503, "1")
        assert third.json()["detail"] == "1 programs run and 1 requests wait; the queue is full"
        seen = await metrics(client)
        assert (seen["spo_sandbox_running"], seen["spo_sandbox_queued"], seen["spo_sandbox_refused_total"]) == (1, 1, 1)
        held.gate.set()
        assert [(await task).json()["message"] for task in (first, second)] == ["first", "second"]
        seen = await metrics(client)
        assert seen['spo_sandbox_runs_total{status="Success"}'] == 2
        assert (seen["spo_sandbox_running"], seen["spo_sandbox_queued"]) == (0, 0)
        assert seen["spo_sandbox_run_seconds_total"] > 0

    with_service(ask)


def test_a_sandbox_that_fails_is_told_from_a_program_that_does() -> None:
    async def ask(client: httpx.AsyncClient, service: Service) -> None:
        answer = await client.post("/run_code", json={"code": "broken"})
        assert (answer.status_code, answer.json()["status"]) == (200, "SandboxError")
        assert answer.json()["message"] == "no bubblewrap today"
        assert (await metrics(client))['spo_sandbox_runs_total{status="SandboxError"}'] == 1
        assert service.log.lines == [("sandbox failed", {"reason": "no bubblewrap today"})]

    with_service(ask)


def test_stopping_takes_nothing_more_gives_up_what_waits_and_kills_what_will_not_end() -> None:
    async def ask(client: httpx.AsyncClient, service: Service) -> None:
        held = service.sandbox
        assert isinstance(held, Held)
        running = asyncio.create_task(client.post("/run_code", json={"code": "running"}))
        await held.started.get()
        waiting = asyncio.create_task(client.post("/run_code", json={"code": "waiting"}))
        while not service.waiting:
            await asyncio.sleep(0)
        service.stop()
        for answer in (await waiting, await client.post("/run_code", json={"code": "late"})):
            assert (answer.status_code, answer.json()["detail"]) == (503, "this sandbox is stopping")
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "stopping")
        assert not running.done()
        service.kill()
        assert (await running).status_code == 503
        assert held.killed.get_nowait() == "running"
        assert held.started.empty()

    with_service(ask)


def test_a_caller_who_leaves_takes_his_program_along() -> None:
    async def run() -> None:
        service = Service(held := Held(), Log(), concurrency=1, queue=1, max_bytes=1000)
        left = asyncio.Event()
        asked = iter([{"type": "http.request", "body": b'{"code": "mine"}'}])

        async def receive() -> dict[str, Any]:
            with contextlib.suppress(StopIteration):
                return next(asked)
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None: ...

        scope = {"type": "http", "method": "POST", "path": "/run_code", "headers": [], "query_string": b""}
        call = asyncio.create_task(service.app()({**scope, "http_version": "1.1"}, receive, send))
        assert await held.started.get() == "mine"
        left.set()
        assert await held.killed.get() == "mine"
        await call
        assert (service.running, service.jobs) == (0, set())

    asyncio.run(run())


@pytest.mark.integration
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is open to others; give a token"),
        (["--host", "::"], "open to others"),
        (["--token-file", "/no/such/file"], "cannot read --token-file /no/such/file: No such file"),
        (["--bwrap", "/no/such/bwrap", "--port", "0"], "/no/such/bwrap"),
        (["--python", "/no/such/python", "--port", "0"], "/no/such/python"),
        (["--read-only", "relative"], "'relative' is not an absolute path"),
        (["--cgroup", "/no/such/group", "--port", "0"], "/no/such/group"),
    ],
)
def test_mistakes_are_named(options: list[str], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPO_SANDBOX_TOKEN", raising=False)
    result = CliRunner().invoke(app, options)
    assert isinstance(result.exception, UserError)
    assert named in str(result.exception)


def test_help_names_every_option_with_its_default() -> None:
    text = CliRunner().invoke(app, ["--help"], terminal_width=200).output
    for name in (
        "--host",
        "--token-file",
        "--workers",
        "--memory",
        "--queue",
        "--grace",
        "--without-isolation",
        "[default: 1024]",
    ):
        assert name in text


def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPO_SANDBOX_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("SPO_SANDBOX_TOKEN", "secret")
    assert read_token(None) == "secret"
    file = tmp_path / "token"
    file.write_text("of the file\n")
    assert read_token(file) == "of the file"
    for text in ("", "\n", "a\nb", "ä"):
        file.write_text(text)
        with pytest.raises(UserError, match="holds no token|is empty"):
            read_token(file)


def test_a_port_that_is_taken_is_named() -> None:
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(UserError, match=r"--port \d+ cannot be bound: Address already in use"):
            bound("127.0.0.1", taken.getsockname()[1])


def test_a_port_that_another_took_while_the_sandbox_was_proven_is_named() -> None:
    with bound("127.0.0.1", 0) as first, bound("127.0.0.1", first.getsockname()[1]) as second:
        listen(first, "127.0.0.1", 8080, 1)
        with pytest.raises(UserError, match="--port 8080 cannot be listened on: Address already in use"):
            listen(second, "127.0.0.1", 8080, 1)


def test_answers_are_what_sandbox_fusion_s_clients_read() -> None:
    names = {"status", "message", "compile_result", "run_result", "executor_pod_name", "files"}

    async def ask(client: httpx.AsyncClient, service: Service) -> None:
        service.sandbox.gate.set()  # type: ignore[attr-defined]
        answer = await client.post("/run_code", json={"code": "x", "language": "python", "unknown": 1})
        assert set(json.loads(answer.text)) == names

    with_service(ask)
