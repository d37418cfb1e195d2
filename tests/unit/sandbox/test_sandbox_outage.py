"""A server that is gone: one caller knocks for all, and all know when it is back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from common.retry import AskAgain
from sandbox_client import SandboxClient, SandboxUnreachable, Status
from sandbox_client.outage import KNOCK, Outage
from tests.support.sandbox_calls import QUICK, Time, client, run
from tests.support.sandbox_double import SandboxDouble, answers, hangs, says


def may_try(outage: Outage) -> bool:
    with contextlib.suppress(AskAgain):
        outage.check()
        return True
    return False


def test_in_an_outage_one_caller_in_a_while_may_try() -> None:
    moment = Time()
    outage = Outage(moment.clock)
    assert [may_try(outage) for _ in range(3)] == [True] * 3
    outage.begins("nobody home")
    assert [may_try(outage) for _ in range(3)] == [False] * 3
    with pytest.raises(AskAgain, match="nobody home"):
        outage.check()
    for _ in range(4):
        moment.now += KNOCK
        assert [may_try(outage) for _ in range(1000)] == [True] + [False] * 999
    outage.ends()
    assert [may_try(outage) for _ in range(3)] == [True] * 3


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
            sandbox._outage.begins("nobody home")
            moment.now += KNOCK
            first = asyncio.create_task(sandbox.run("while True: pass"))
            while not server.requests:
                await asyncio.sleep(0)
            answer = await sandbox.run_code(QUICK)
            assert answer.status is Status.SUCCESS
            assert moment.sleeps == []
            first.cancel()
            await asyncio.wait([first])

    run(test())


def test_a_server_that_answers_anything_is_no_outage() -> None:
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
