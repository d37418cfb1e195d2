"""When SandboxClient asks again, how long it waits, and when it gives up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from email.utils import formatdate

import pytest

from sandbox_client import RunCodeRequest, SandboxClient, SandboxUnavailable, Status
from tests.support.sandbox_calls import QUICK, Time, client, outcome, run
from tests.support.sandbox_double import SandboxDouble, answers, hangs, says, sends


def test_backoff_doubles_with_jitter_until_the_server_answers() -> None:
    busy = says(b"upstream timed out", status=504, kind="text/plain")
    answer, server, moment = run(outcome(busy, busy, busy, busy, answers()))
    assert answer.status is Status.SUCCESS
    assert len(server.requests) == 5
    for slept, most in zip(moment.sleeps, (0.5, 1.0, 2.0, 4.0), strict=True):
        assert most / 2 <= slept <= most
    assert all(request == server.requests[0] for request in server.requests)


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_in_seconds_is_honoured(status: int) -> None:
    answer, _, moment = run(outcome(says(b"later", status=status, Retry_After="17"), answers()))
    assert answer.status is Status.SUCCESS
    assert moment.sleeps == [17.0]


def test_retry_after_as_a_date_is_honoured() -> None:
    later = says(b"later", status=429, Retry_After=formatdate(time.time() + 60, usegmt=True))
    _, _, moment = run(outcome(later, answers()))
    assert 50 < moment.sleeps[0] <= 60


@pytest.mark.parametrize("value", ["soon", "-5", "", "1e3", "9" * 5000, "\xff", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_retry_after_that_says_nothing_leaves_the_backoff(value: str) -> None:
    head = f"HTTP/1.1 429 x\r\nRetry-After: {value}\r\nContent-Length: 0\r\n\r\n".encode("latin-1")
    answer, _, moment = run(outcome(sends(head), answers()))
    assert answer.status is Status.SUCCESS
    assert moment.sleeps[0] <= 0.5


def test_nobody_waits_for_a_server_that_wants_more_time_than_there_is() -> None:
    error, server, moment = run(outcome(says(b"later", status=429, Retry_After="3600"), deadline=60))
    assert isinstance(error, SandboxUnavailable)
    assert (len(server.requests), moment.sleeps) == (1, [])


def test_the_whole_call_ends_by_its_deadline() -> None:
    error, server, moment = run(outcome(says(b"", status=504), attempts=10_000, deadline=60))
    assert isinstance(error, SandboxUnavailable)
    assert 40 < sum(moment.sleeps) <= 60.02
    assert len(server.requests) == len(moment.sleeps) + 1


def test_waiting_for_a_slot_counts_for_the_deadline() -> None:
    async def test() -> None:
        async with SandboxDouble(hangs) as server, client(server, concurrency=1, deadline=0.05) as sandbox:
            first = asyncio.create_task(sandbox.run_code(RunCodeRequest(code="1")))
            while not server.requests:
                await asyncio.sleep(0)
            with pytest.raises(SandboxUnavailable, match="in time"):
                await sandbox.run_code(QUICK)
            assert len(server.requests) == 1
            first.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await first

    run(test())


def test_an_attempt_may_take_the_programs_own_time_and_the_timeout() -> None:
    async def slow(double: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        await answers()(double, reader, writer)

    patient = RunCodeRequest(code="1", compile_timeout=0.001, run_timeout=30)
    answer, _, moment = run(outcome(slow, request=patient, timeout=0.01))
    assert (answer.status, moment.sleeps) == (Status.SUCCESS, [])

    async def silent(double: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    # Time enough to connect, also where the machine is busy.
    error, _, _ = run(outcome(silent, request=QUICK, timeout=0.5, attempts=1))
    assert "no answer in time" in str(error)


def test_backing_off_holds_no_slot() -> None:
    async def test() -> None:
        asleep = asyncio.Event()

        async def sleep(seconds: float) -> None:
            asleep.set()
            await asyncio.Event().wait()

        server = SandboxDouble(says(b"", status=503), answers())
        async with server, SandboxClient(server.url, concurrency=1, sleep=sleep) as sandbox:
            waiting = asyncio.create_task(sandbox.run_code(QUICK))
            await asleep.wait()
            assert (await sandbox.run_code(QUICK)).status is Status.SUCCESS
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting

    run(test())


def test_a_dead_server_that_comes_back_answers() -> None:
    async def test() -> None:
        async with SandboxDouble() as first:
            port = first.port
        server = SandboxDouble(port=port)

        async def sleep(seconds: float) -> None:
            await moment.sleep(seconds)
            if len(moment.sleeps) == 3:
                await server.start()

        moment = Time()
        async with SandboxClient(first.url, clock=moment.clock, sleep=sleep) as sandbox:
            answer = await sandbox.run_code(QUICK)
        assert answer.status is Status.SUCCESS
        assert (len(moment.sleeps), len(server.requests)) == (3, 1)
        await server.__aexit__(None, None, None)

    run(test())


def test_a_dead_server_is_an_unavailable_sandbox() -> None:
    async def test() -> None:
        async with SandboxDouble() as server:
            pass
        async with client(server) as sandbox:
            with pytest.raises(SandboxUnavailable, match=r"127\.0\.0\.1:\d+: no result in 5 attempts"):
                await sandbox.run_code(QUICK)

    run(test())
