"""The server's answers, without a process: tokens, lengths, queues, counts; and the command's own refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from common.errors import UserError
from common.log import get_logger
from common.network import bound, listen
from sandbox_client import TOKEN_VARIABLE, RequestRefused, RunCodeRequest, RunCodeResponse, SandboxUnavailable, Status
from sandbox_client.cli import app, read_token
from sandbox_client.server import SandboxService
from sandbox_client.settings import Settings
from tests.support.event_loop import within

JSON = {"Content-Type": "application/json"}


class Held:
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.started, self.killed = asyncio.Queue[str](), asyncio.Queue[str]()

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


def served(token: str | None = None) -> Callable[[Any], Any]:
    """Plays a test with a client of a service of one worker and a queue of one, the service, and its sandbox."""

    @asynccontextmanager
    async def start() -> AsyncIterator[tuple[httpx.AsyncClient, SandboxService, Held]]:
        held = Held()
        service = SandboxService(held, Settings(workers=1, queue=1, files_mb=3), token, get_logger())
        assert service.max_bytes == 6 << 20
        service.max_bytes = 1000
        transport = httpx.ASGITransport(service.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8080") as client:
            yield client, service, held

    return within(start, gives=3)


def post(client: httpx.AsyncClient, code: str, **values: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post("/run_code", json={"code": code, **values}))


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in (await client.get("/metrics")).text.splitlines() if line[:1] != "#"]
    return {name.removeprefix("spo_sandbox_"): float(value) for name, value in lines}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 422, "request: Invalid JSON"),
        (b"{}", 422, "code: Field required"),
        (b'{"code": "", "run_timeout": -1, "files": {"a": 3}}', 422, "run_timeout: Input should be greater than 0; fi"),
        (b'{"code": "' + b"x" * 1000 + b'"}', 413, "longer than 1000 bytes"),
        (b'{"code": "", "language": "cobol"}', 422, "no cobol here"),
    ],
)
@served()
async def test_an_impossible_request_is_refused_in_one_line(client, service, held, body, status, words) -> None:
    answer = await client.post("/run_code", content=body, headers=JSON)
    assert answer.status_code == status
    assert words in answer.json()["detail"]
    assert "\n" not in answer.json()["detail"]
    assert (service.jobs, service.running, service.completed) == (set(), 0, 0)


# Headers beside what a program sends, and the status; a browser sends `Origin` with every POST, and chooses `Host`.
SENDERS: dict[str, tuple[dict[str, str], int]] = {
    "a client": ({}, 422),
    "charset": ({"Content-Type": "Application/JSON; charset=utf-8"}, 422),
    "another site": ({"Origin": "https://a.page"}, 403),
    "rebinding": ({"Host": "a.page:8080"}, 403),
    "rebinding to an address": ({"Host": "127.0.0.1.a.page"}, 403),
    "form": ({"Content-Type": "text/plain"}, 415),
}


@pytest.mark.parametrize("name", SENDERS)
@served()
async def test_without_a_token_no_web_page_is_served(client, service, held, name) -> None:
    headers, status = SENDERS[name]
    body = b'{"code": "", "language": "cobol"}'
    assert (await client.post("/run_code", content=body, headers={**JSON, **headers})).status_code == status
    assert held.started.empty() == (status != 422)
    assert (await client.get("/metrics", headers=headers)).status_code == (403 if status == 403 else 200)
    assert (await client.get("/health", headers=headers)).status_code == 200


@served(token="right")
async def test_the_token_is_asked_for_everywhere_but_at_health(client, service, held) -> None:
    for path, method, status in (("/run_code", "POST", 422), ("/metrics", "GET", 200)):
        for value in (None, "Bearer wrong", "right", "Bearer ä"):
            headers = {"Authorization": value.encode()} if value else {}
            assert (await client.request(method, path, headers=headers, content=b"{}")).status_code == 401
        # What a web page cannot send without the token is no matter with it.
        right = {"Authorization": "Bearer right", "Host": "sandbox", "Origin": "http://a.page", **JSON}
        assert (await client.request(method, path, headers=right, content=b"{}")).status_code == status
    assert (await client.get("/health")).json() == {"status": "ok", "isolated": True}


@served()
async def test_a_program_waits_runs_and_is_counted_or_is_sent_away(client, service, held) -> None:
    names = {"status", "message", "compile_result", "run_result", "executor_pod_name", "files"}  # SandboxFusion's
    first = post(client, "first", unknown=1)
    assert await held.started.get() == "first"
    second = post(client, "second")
    while not service.waiting:
        await asyncio.sleep(0)
    third = await post(client, "third")
    assert (third.status_code, third.headers["Retry-After"]) == (503, "1")
    assert third.json()["detail"] == "1 programs run and 1 requests wait; the queue is full"
    counts = await metrics(client)
    assert (counts["running"], counts["queued"], counts["refused_total"]) == (1, 1, 1)
    held.gate.set()
    results = [(await task).json() for task in (first, second)]
    assert [result["message"] for result in results] == ["first", "second"]
    assert set(results[0]) == names
    counts = await metrics(client)
    assert (counts['runs_total{status="Success"}'], counts["running"], counts["queued"]) == (2, 0, 0)
    assert counts["run_seconds_total"] > 0


@served()
async def test_a_sandbox_that_fails_is_no_failed_program(client, service, held) -> None:
    answer = await post(client, "broken")
    assert answer.status_code == 200
    assert (answer.json()["status"], answer.json()["message"]) == ("SandboxError", "no bubblewrap today")
    assert (await metrics(client))['runs_total{status="SandboxError"}'] == 1


@served()
async def test_stopping_gives_up_what_waits_and_kills_what_runs(client, service, held) -> None:
    running = post(client, "running")
    await held.started.get()
    waiting = post(client, "waiting")
    while not service.waiting:
        await asyncio.sleep(0)
    service.stop()
    for answer in (await waiting, await post(client, "late")):
        assert (answer.status_code, answer.json()["detail"]) == (503, "this sandbox is stopping")
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "stopping")
    assert not running.done()
    service.kill()
    assert (await running).status_code == 503
    assert held.killed.get_nowait() == "running"
    assert held.started.empty()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is open to others; give a token"),
        (["-o", "bwrap=/no/such/bwrap"], "bubblewrap '/no/such/bwrap' is not a program"),
        (["-o", "python=/no/such/python"], "sandbox interpreter '/no/such/python' cannot be run"),
        (["-o", "cgroup=/no/such/group"], "no control group for memory can be made in '/no/such/group'"),
        (["-o", "read_only=[relative]"], "read_only: 'relative' is not an absolute path"),
        (["-o", "workers=0"], "workers = 0: input should be greater than or equal to 1"),
    ],
)
def test_a_refusal_names_the_setting(options: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    result = CliRunner().invoke(app, ["--port", "0", *options])
    assert isinstance(result.exception, UserError)
    assert words in str(result.exception)


def test_help_names_every_setting_with_its_default() -> None:
    text = CliRunner().invoke(app, ["--help"], terminal_width=200).output
    assert [name for name in Settings.model_fields if f"{name}: " not in text] == []
    assert "[default: 1024]" in text


def test_a_servers_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    assert read_token(None) == "secret"
    file = tmp_path / "token"
    file.write_text("of the file\n")
    assert read_token(file) == "of the file"
    for text in ("", "a\nb", "ä"):
        file.write_text(text)
        with pytest.raises(UserError, match="holds no token|is empty"):
            read_token(file)


def test_a_port_that_is_taken_is_named() -> None:
    with bound("127.0.0.1", 0) as first, bound("127.0.0.1", first.getsockname()[1]) as second:
        listen(first, "127.0.0.1", 8080, 1)
        with pytest.raises(UserError, match=r"--port \d+ cannot be bound: Address already in use"):
            bound("127.0.0.1", first.getsockname()[1])
        # Taken by another process while the sandbox was tested.
        with pytest.raises(UserError, match="--port 8080 cannot be listened on: Address already in use"):
            listen(second, "127.0.0.1", 8080, 1)
