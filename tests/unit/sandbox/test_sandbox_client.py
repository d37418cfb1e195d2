"""SandboxClient: its connections and tokens, when it asks again, how long it waits, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import sandbox_client
from common.config import SandboxConfig
from common.errors import UserError
from common.log import get_logger
from sandbox_client import (
    TOKEN_VARIABLE,
    RunCodeRequest,
    SandboxClient,
    SandboxUnavailable,
    SandboxUnreachable,
    Status,
    make_sandbox,
    wait_until_ready,
)
from sandbox_client.client import PROBE_INTERVAL
from tests.support.sandbox_double import QUICK, Reply, SandboxDouble, Time, answers, client, hangs, outcome, run, says

BUSY = says(b"full", status=503)
LOCAL = "http://127.0.0.1:1"


@asynccontextmanager
async def under_way(server: SandboxDouble, sandbox: SandboxClient) -> AsyncIterator[asyncio.Task[Any]]:
    """A call whose request has arrived; it is cancelled at the end."""
    call = asyncio.create_task(sandbox.run_code(RunCodeRequest(code="while True: pass")))
    async with asyncio.timeout(60):
        while not server.requests:
            await asyncio.sleep(0)
    yield call
    call.cancel()
    await asyncio.wait([call])


def test_requests_are_bounded_and_connections_reused() -> None:
    async def test() -> None:
        async with SandboxDouble() as server:
            server.gate.clear()
            async with client(server, concurrency=4) as sandbox:
                calls = [asyncio.create_task(sandbox.run_code(QUICK)) for _ in range(50)]
                while server.open < 4:
                    await asyncio.sleep(0)
                server.gate.set()
                await asyncio.gather(*calls)
                assert (len(server.requests), server.most_open, server.accepted) == (50, 4, 4)
            await server.all_gone()  # closing the client closes its connections

    run(test())


def test_a_cancelled_call_frees_its_slot_and_waiting_counts() -> None:
    async def test() -> None:
        async with SandboxDouble(hangs, answers()) as server, client(server, concurrency=1, deadline=0.05) as sandbox:
            async with under_way(server, sandbox):
                with pytest.raises(SandboxUnavailable, match="in time"):
                    await sandbox.run_code(QUICK)
                assert len(server.requests) == 1
            await server.all_gone()
            patient = RunCodeRequest(code="")
            assert (await sandbox.run_code(patient)).status is Status.SUCCESS

    run(test())


@pytest.mark.parametrize(
    ("url", "token", "key"),
    [
        *((url, None, "url") for url in ("", "localhost:8080", "ftp://x", "http://[::1", "http://a:65536", "http://")),
        ("http://a..b", None, "url"),
        (LOCAL, "a\nb", "token"),
    ],
)
def test_an_impossible_address_or_token_is_refused(url: str, token: str | None, key: str) -> None:
    with pytest.raises(UserError, match=rf"sandbox\.{key}") as caught:
        SandboxClient(url, token=token)
    assert token is None or token not in str(caught.value)


def test_token_file_goes_before_key_before_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(**values: Any) -> str | None:
        sandbox = make_sandbox(SandboxConfig(url=LOCAL, **values))
        return sandbox._http.headers.get("authorization")  # type: ignore[attr-defined]

    file = tmp_path / "token"
    file.write_text("of the file\n")
    assert sent() is None
    monkeypatch.setenv(TOKEN_VARIABLE, "of the environment")
    assert sent() == "Bearer of the environment"
    assert sent(token="of the key") == "Bearer of the key"
    assert sent(token="of the key", token_file=str(file)) == "Bearer of the file"
    with pytest.raises(UserError, match=r"cannot read sandbox.token_file .*none: No such file"):
        sent(token_file=str(tmp_path / "none"))


def test_a_script_s_call_sends_its_token_past_every_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with SandboxDouble() as server:
            answer = await asyncio.to_thread(sandbox_client.run_code, "print(89)", url=server.url, memory_mb=64)
        assert answer.run_result is not None
        assert answer.run_result.stdout == "89\n"
        assert server.requests[0]["memory_limit_MB"] == 64
        assert server.headers[0]["authorization"] == "Bearer from-env"

    for variable in ("HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, LOCAL)
    monkeypatch.setenv(TOKEN_VARIABLE, "from-env")
    run(test())


def test_a_busy_server_is_asked_again_when_it_says() -> None:
    answer, server, moment = run(outcome(says(b"", status=429, Retry_After="17"), BUSY, answers()))
    assert answer.status is Status.SUCCESS
    assert (moment.sleeps[0], 0.5 <= moment.sleeps[1] <= 1.0) == (17, True)
    assert server.requests == [server.requests[0]] * 3
    error, server, moment = run(outcome(BUSY, attempts=10_000, deadline=60))
    assert isinstance(error, SandboxUnavailable)
    assert 40 < sum(moment.sleeps) <= 60.02


def test_callers_of_a_dead_server_make_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with SandboxDouble() as server:
            pass
        moment = Time()
        async with client(server, moment, concurrency=8, attempts=1) as sandbox:
            sent: list[Any] = []
            stream = sandbox._http.stream
            monkeypatch.setattr(sandbox._http, "stream", lambda *a, **b: sent.append(a) or stream(*a, **b))

            async def crowd() -> list[Any]:
                calls = (sandbox.run_code(QUICK) for _ in range(1000))
                return await asyncio.gather(*calls, return_exceptions=True)

            outcomes = await crowd()
            assert len(sent) == 8, "as many as were under way when the first one failed"
            for probes in range(1, 4):
                moment.now += PROBE_INTERVAL
                outcomes += await crowd()
                assert len(sent) == 8 + probes, "one a while"
            assert {(type(error), str(error)) for error in outcomes} == {
                (
                    SandboxUnreachable,
                    f"sandbox 127.0.0.1:{server.port}: no result in 1 attempts; last: ConnectError: "
                    "All connection attempts failed",
                )
            }
            moment.now += PROBE_INTERVAL
            async with SandboxDouble(hangs, answers(), port=server.port) as back:
                async with under_way(back, sandbox):
                    # The first program after an outage holds up no other.
                    assert (await sandbox.run_code(QUICK)).status is Status.SUCCESS
                await sandbox.close()

    run(test())


def ready(*replies: Reply, seconds: float = 600.0) -> tuple[int, list[Any]]:
    """Requests made until a server that plays these replies was seen to be ready, and the log."""

    async def test() -> int:
        async with SandboxDouble(*replies) as server, SandboxClient(server.url, attempts=1) as sandbox:
            try:
                await wait_until_ready(sandbox, seconds, get_logger())
            finally:
                await sandbox.close()
            return len(server.requests)

    with capture_logs() as lines:
        return asyncio.run(test()), lines


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        (hangs, r"gives no result within sandbox.wait = 0.5 s; start it \(spo-sandbox\), or set sandbox.url"),
        (says(b"no token", status=401), "status 401: .*no token.*; sandbox.token or sandbox.url must be wrong"),
    ],
)
def test_a_sandbox_that_cannot_be_used_is_one_line(reply: Reply, line: str) -> None:
    with pytest.raises(UserError, match=line):
        ready(reply, seconds=0.5 if reply is hangs else 600)


def test_a_sandbox_is_ready_after_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_client.PAUSE", 0.01)
    assert ready(answers(stdout="42\n")) == (1, [])
    requests, log = ready(BUSY, seconds=0.5)
    assert requests >= 1
    assert [line["event"] for line in log] == [
        "waiting for the sandbox",
        "the sandbox gave no result within sandbox.wait; continuing",
    ]
    assert "status 503: full" in log[1]["reason"]
