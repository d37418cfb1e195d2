"""A server that is gone: one caller knocks for all, and all know when it is back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from common.network import RetryableError
from sandbox_client import RunCodeRequest, SandboxClient, SandboxUnreachable, Status
from sandbox_client.circuit_breaker import PROBE_INTERVAL, CircuitBreaker
from tests.support.sandbox_calls import QUICK, Time, client, run
from tests.support.sandbox_double import SandboxDouble, answers, hangs, says


def may_try(breaker: CircuitBreaker) -> bool:
    with contextlib.suppress(RetryableError):
        breaker.check()
        return True
    return False


def test_while_it_is_open_one_caller_in_a_while_may_try() -> None:
    moment = Time()
    breaker = CircuitBreaker(moment.clock)
    assert [may_try(breaker) for _ in range(3)] == [True] * 3
    breaker.connection_failed("nobody home")
    assert [may_try(breaker) for _ in range(3)] == [False] * 3
    with pytest.raises(RetryableError, match="nobody home"):
        breaker.check()
    for _ in range(4):
        moment.now += PROBE_INTERVAL
        assert [may_try(breaker) for _ in range(1000)] == [True] + [False] * 999
    asyncio.run(breaker.trace("connection.connect_tcp.complete", {}))
    assert [may_try(breaker) for _ in range(3)] == [True] * 3


def test_a_thousand_callers_of_a_dead_server_are_not_a_thousand_connections() -> None:
    async def test() -> None:
        async with SandboxDouble() as server:
            pass
        async with client(server, concurrency=8, attempts=1) as sandbox:
            tried = spied(sandbox)
            found = await asyncio.gather(*(sandbox.run_code(QUICK) for _ in range(1000)), return_exceptions=True)
        assert all(isinstance(error, SandboxUnreachable) for error in found)
        assert {str(error) for error in found} == {
            f"sandbox 127.0.0.1:{server.port}: no result in 1 attempts; last: ConnectError: "
            "All connection attempts failed"
        }
        assert len(tried) == 8, "as many as were under way when the first one failed"

    run(test())


def test_nobody_waits_for_the_first_program_after_an_outage() -> None:
    async def test() -> None:
        moment = Time()
        async with SandboxDouble(hangs, answers()) as server, client(server, moment) as sandbox:
            sandbox._breaker.connection_failed("nobody home")
            moment.now += PROBE_INTERVAL
            first = asyncio.create_task(sandbox.run_code(RunCodeRequest(code="while True: pass")))
            while not server.requests:
                await asyncio.sleep(0)
            answer = await sandbox.run_code(QUICK)
            assert answer.status is Status.SUCCESS
            assert moment.sleeps == []
            first.cancel()
            await asyncio.wait([first])

    run(test())


def test_a_server_that_answers_anything_can_be_reached() -> None:
    async def test() -> None:
        async with SandboxDouble(says(b"", status=503)) as server, client(server, attempts=3) as sandbox:
            tried = spied(sandbox)
            with pytest.raises(Exception, match="status 503") as caught:
                await sandbox.run_code(QUICK)
            assert not isinstance(caught.value, SandboxUnreachable)
            assert len(tried) == 3

    run(test())


def spied(sandbox: SandboxClient) -> list[Any]:
    """One entry for each request that a client really sends."""
    sent: list[Any] = []
    stream = sandbox._http.stream

    def spy(*arguments: Any, **named: Any) -> Any:
        sent.append(arguments)
        return stream(*arguments, **named)

    sandbox._http.stream = spy  # type: ignore[method-assign]
    return sent
