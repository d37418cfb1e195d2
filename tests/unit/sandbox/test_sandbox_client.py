"""SandboxClient: its connections and tokens, when it asks again, how long it waits, and when it gives up."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import sandbox_client
from common.config import SandboxConfig
from common.errors import UserError
from common.log import get_logger
from sandbox_client import RunCodeRequest, SandboxClient, SandboxUnavailable, SandboxUnreachable, Status, make_sandbox
from sandbox_client.client import PROBE_INTERVAL
from sandbox_client.factory import TOKEN_VARIABLE, wait_until_ready
from tests.support.sandbox_double import (
    QUICK,
    Reply,
    SandboxDouble,
    Time,
    answers,
    client,
    gated,
    hangs,
    outcome,
    run,
    says,
    sends,
)

BUSY = says(b"", status=503)


async def ended(call: asyncio.Task[Any]) -> None:
    call.cancel()
    await asyncio.wait([call])


async def started(server: SandboxDouble, sandbox: SandboxClient) -> asyncio.Task[Any]:
    """A call whose request has arrived."""
    call = asyncio.create_task(sandbox.run_code(RunCodeRequest(code="while True: pass")))
    while not server.requests:
        await asyncio.sleep(0)
    return call


def spied(sandbox: SandboxClient, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each request that a client really sends."""
    sent: list[Any] = []
    stream = sandbox._http.stream
    monkeypatch.setattr(sandbox._http, "stream", lambda *a, **b: sent.append(a) or stream(*a, **b))
    return sent


def test_requests_are_bounded_and_connections_reused() -> None:
    async def test() -> None:
        async with SandboxDouble(gated(asyncio.Event(), at=4)) as server:
            async with client(server, concurrency=4) as sandbox:
                await asyncio.gather(*(sandbox.run_code(QUICK) for _ in range(50)))
                for _ in range(20):
                    await sandbox.run_code(QUICK)
                assert (len(server.requests), server.most_open, server.accepted) == (70, 4, 4)
            await server.all_gone()  # closing the client closes its connections

    run(test())


@pytest.mark.integration
def test_waiting_for_a_slot_is_not_an_attempt() -> None:
    async def test() -> None:
        free, moment = asyncio.Event(), Time()
        async with SandboxDouble(gated(free)) as server, client(server, moment, concurrency=1, timeout=1.0) as sandbox:
            first = asyncio.create_task(sandbox.run_code(RunCodeRequest(code="1")))
            second = asyncio.create_task(sandbox.run_code(QUICK))
            await asyncio.wait([second], timeout=1.2)  # longer than its attempt may take
            free.set()
            await asyncio.gather(first, second)
            assert (len(server.requests), moment.sleeps) == (2, [])

    run(test())


def test_waiting_for_a_slot_counts_for_the_deadline() -> None:
    async def test() -> None:
        async with SandboxDouble(hangs) as server, client(server, concurrency=1, deadline=0.05) as sandbox:
            first = await started(server, sandbox)
            with pytest.raises(SandboxUnavailable, match="in time"):
                await sandbox.run_code(QUICK)
            assert len(server.requests) == 1
            await ended(first)

    run(test())


def test_a_cancelled_call_gives_slot_and_connection_back() -> None:
    async def test() -> None:
        async with SandboxDouble(hangs, answers()) as server, client(server, concurrency=1) as sandbox:
            await ended(await started(server, sandbox))
            await server.all_gone()
            assert (await sandbox.run_code(QUICK)).status is Status.SUCCESS

    run(test())


def test_backing_off_holds_no_slot() -> None:
    async def test() -> None:
        asleep = asyncio.Event()

        async def sleep(_: float) -> None:
            asleep.set()
            await asyncio.Event().wait()

        server = SandboxDouble(BUSY, answers())
        async with server, SandboxClient(server.url, concurrency=1, sleep=sleep) as sandbox:
            waiting = asyncio.create_task(sandbox.run_code(QUICK))
            await asleep.wait()
            assert (await sandbox.run_code(QUICK)).status is Status.SUCCESS
            await ended(waiting)

    run(test())


def test_idle_connections_that_were_closed_are_made_again() -> None:
    async def once(double: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answers()(double, reader, writer)
        writer.close()

    async def test() -> None:
        async with SandboxDouble(once) as server, client(server) as sandbox:
            for _ in range(5):
                assert (await sandbox.run_code(QUICK)).status is Status.SUCCESS
                await server.all_gone()

    run(test())


@pytest.mark.parametrize(
    "url", ["", "localhost:8080", "ftp://x", "http://[::1", "http://a:65536", "http://a..b", "http://"]
)
def test_an_impossible_address_is_named(url: str) -> None:
    with pytest.raises(UserError, match=r"sandbox\.url = .* must be of the form"):
        SandboxClient(url)


@pytest.mark.parametrize("token", ["a\nb", "schlüssel"])
def test_a_token_that_no_header_carries_is_not_shown(token: str) -> None:
    with pytest.raises(UserError, match=r"sandbox\.token") as caught:
        SandboxClient("http://127.0.0.1:1", token=token)
    assert token not in str(caught.value)


@pytest.mark.parametrize("path", ["", "/", "/run_code", "/run_code/"])
def test_the_url_may_name_the_call_and_a_password_is_not_shown(path: str) -> None:
    async def test() -> None:
        async with (
            SandboxDouble(answers(), says(b"", status=404)) as server,
            SandboxClient(server.url.replace("//", "//user:geheim@") + path) as sandbox,
        ):
            await sandbox.run_code(QUICK)
            with pytest.raises(SandboxUnavailable) as caught:
                await sandbox.run_code(QUICK)
        assert "geheim" not in str(caught.value)

    run(test())


def test_token_file_goes_before_key_before_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(**values: Any) -> str | None:
        sandbox = make_sandbox(SandboxConfig(url="http://127.0.0.1:1", **values))
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

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv(TOKEN_VARIABLE, "from-env")
    run(test())


def test_backoff_doubles_with_jitter_until_the_server_answers() -> None:
    busy = says(b"upstream timed out", status=504, kind="text/plain")
    answer, server, moment = run(outcome(busy, busy, busy, busy, answers()))
    assert answer.status is Status.SUCCESS
    for slept, most in zip(moment.sleeps, (0.5, 1.0, 2.0, 4.0), strict=True):
        assert most / 2 <= slept <= most
    assert server.requests == [server.requests[0]] * 5


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(status: int) -> None:
    at = formatdate(time.time() + 60, usegmt=True)
    replies = (says(b"", status=status, Retry_After="17"), says(b"", status=status, Retry_After=at), answers())
    answer, _, moment = run(outcome(*replies))
    assert answer.status is Status.SUCCESS
    assert moment.sleeps[0] == 17
    assert 50 < moment.sleeps[1] <= 60


@pytest.mark.parametrize("value", ["soon", "-5", "", "1e3", "9" * 5000, "\xff", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_retry_after_without_meaning_leaves_the_backoff(value: str) -> None:
    head = f"HTTP/1.1 429 x\r\nRetry-After: {value}\r\nContent-Length: 0\r\n\r\n".encode("latin-1")
    answer, _, moment = run(outcome(sends(head), answers()))
    assert answer.status is Status.SUCCESS
    assert moment.sleeps[0] <= 0.5


def test_a_call_ends_by_its_deadline() -> None:
    error, server, moment = run(outcome(BUSY, attempts=10_000, deadline=60))
    assert isinstance(error, SandboxUnavailable)
    assert 40 < sum(moment.sleeps) <= 60.02
    assert len(server.requests) == len(moment.sleeps) + 1
    error, server, moment = run(outcome(says(b"later", status=429, Retry_After="3600"), deadline=60))
    assert isinstance(error, SandboxUnavailable)
    assert (len(server.requests), moment.sleeps) == (1, [])  # no wait for what cannot come in time


def test_an_attempt_may_take_the_programs_time_and_the_timeout() -> None:
    async def slow(double: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1.1)  # longer than the timeout alone, in which even a busy machine connects
        await answers()(double, reader, writer)

    patient = RunCodeRequest(code="1", compile_timeout=0.001, run_timeout=30)
    answer, _, moment = run(outcome(slow, request=patient, timeout=1.0))
    assert (answer.status, moment.sleeps) == (Status.SUCCESS, [])
    # Time enough to connect, also where the machine is busy.
    error, _, _ = run(outcome(hangs, timeout=0.5, attempts=1))
    assert "no answer in time" in str(error)


def test_a_server_that_comes_back_answers() -> None:
    async def test() -> None:
        async with SandboxDouble() as first:
            pass
        server, moment = SandboxDouble(port=first.port), Time()

        async def sleep(seconds: float) -> None:
            await moment.sleep(seconds)
            if len(moment.sleeps) == 3:
                await server.__aenter__()

        async with SandboxClient(first.url, clock=moment.clock, sleep=sleep) as sandbox:
            assert (await sandbox.run_code(QUICK)).status is Status.SUCCESS
        assert (len(moment.sleeps), len(server.requests)) == (3, 1)
        await server.__aexit__()

    run(test())


def test_callers_of_a_dead_server_make_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with SandboxDouble() as server:
            pass
        moment = Time()
        async with client(server, moment, concurrency=8, attempts=1) as sandbox:
            sent = spied(sandbox, monkeypatch)

            async def crowd() -> list[Any]:
                calls = (sandbox.run_code(QUICK) for _ in range(1000))
                return await asyncio.gather(*calls, return_exceptions=True)

            outcomes = await crowd()
            assert len(sent) == 8, "as many as were under way when the first one failed"
            for probes in range(1, 4):
                moment.now += PROBE_INTERVAL
                outcomes += await crowd()
                assert len(sent) == 8 + probes, "one a while"
        assert {type(error) for error in outcomes} == {SandboxUnreachable}
        assert {str(error) for error in outcomes} == {
            f"sandbox 127.0.0.1:{server.port}: no result in 1 attempts; last: ConnectError: "
            "All connection attempts failed"
        }

    run(test())


def test_after_an_outage_the_first_program_holds_up_no_other() -> None:
    async def test() -> None:
        moment = Time()
        async with SandboxDouble(hangs, answers()) as server, client(server, moment) as sandbox:
            sandbox._breaker.connection_failed("connection refused")
            moment.now += PROBE_INTERVAL
            first = await started(server, sandbox)
            assert (await sandbox.run_code(QUICK)).status is Status.SUCCESS
            assert moment.sleeps == []
            await ended(first)

    run(test())


def test_a_server_that_answers_anything_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with SandboxDouble(BUSY) as server, client(server, attempts=3) as sandbox:
            sent = spied(sandbox, monkeypatch)
            with pytest.raises(SandboxUnavailable, match="status 503") as caught:
                await sandbox.run_code(QUICK)
            assert not isinstance(caught.value, SandboxUnreachable)
            assert len(sent) == 3

    run(test())


def ready(*replies: Reply, seconds: float = 600.0) -> tuple[int, list[Any]]:
    """Requests made until a server that plays these replies was found ready, and the log."""

    async def test() -> int:
        async with SandboxDouble(*replies) as server, SandboxClient(server.url, attempts=1) as sandbox:
            try:
                await wait_until_ready(sandbox, seconds, get_logger())
            finally:
                await sandbox.close()
            return len(server.requests)

    with capture_logs() as lines:
        return asyncio.run(test()), lines


def test_one_program_shows_that_a_sandbox_is_ready() -> None:
    assert ready(answers(stdout="42\n")) == (1, [])


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        (hangs, r"gives no result within sandbox.wait = 0.5 s; start it \(spo-sandbox\), or set sandbox.url"),
        (says(b"no token", status=401), "status 401: .*no token.*; sandbox.token or sandbox.url must be wrong"),
        (answers(status="Failed", message="no such language"), "the sandbox does not run Python: no such language"),
    ],
)
def test_a_sandbox_that_cannot_be_used_is_one_line(reply: Reply, line: str) -> None:
    with pytest.raises(UserError, match=line):
        ready(reply, seconds=0.5 if reply is hangs else 600)


def test_a_full_server_is_no_reason_not_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_client.factory.PAUSE", 0.01)
    requests, log = ready(says(b"full", status=503), seconds=0.5)
    assert requests >= 1
    assert [line["event"] for line in log] == [
        "waiting for the sandbox",
        "the sandbox gave no result within sandbox.wait; going on",
    ]
    assert "status 503: full" in log[1]["reason"]


def test_a_server_that_is_not_there_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with SandboxDouble() as first:
            pass
        async with SandboxClient(first.url, attempts=1) as sandbox:
            with pytest.raises(UserError, match=f"sandbox 127.0.0.1:{first.port} gives no result .*ConnectError"):
                await wait_until_ready(sandbox, 0.2, get_logger())
            log.clear()
            waiting = asyncio.create_task(wait_until_ready(sandbox, 600.0, get_logger()))
            while not log:
                await asyncio.sleep(0.001)
            async with SandboxDouble(port=first.port) as server:
                await waiting
                assert len(server.requests) == 1
                await sandbox.close()

    monkeypatch.setattr("sandbox_client.factory.PAUSE", 0.01)
    with capture_logs() as log:
        asyncio.run(test())
    assert [line["event"] for line in log] == ["waiting for the sandbox"]
