"""A generator that starts: it waits for its sandbox, and says in one line what is wrong with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from common.errors import UserError
from common.log import get_logger
from sandbox_client import SandboxClient, ready
from sandbox_client.ready import wait_until_ready
from tests.support.sandbox_double import Reply, SandboxDouble, answers, hangs, says

SOON = 1.0  # seconds


@pytest.fixture(autouse=True)
def logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    monkeypatch.setattr(ready, "PAUSE", 0.01)
    with capture_logs() as told:
        yield told


def wait_for(*replies: Reply, seconds: float = 600.0) -> int:
    """Requests made until a server that plays these replies was found ready."""

    async def test() -> int:
        async with SandboxDouble(*replies) as server, SandboxClient(server.url, attempts=1) as sandbox:
            try:
                await wait_until_ready(sandbox, seconds, get_logger())
            finally:
                await sandbox.close()
            return len(server.requests)

    return asyncio.run(test())


def test_one_program_is_enough(logs: list[Any]) -> None:
    assert wait_for(answers(stdout="42\n")) == 1
    assert logs == []


def test_a_server_that_is_not_there_yet_is_waited_for(logs: list[Any]) -> None:
    async def test() -> None:
        async with SandboxDouble() as first:
            port = first.port
        async with SandboxClient(first.url, attempts=1) as sandbox:
            waiting = asyncio.create_task(wait_until_ready(sandbox, 600.0, get_logger()))
            while not logs:
                await asyncio.sleep(0.001)
            async with SandboxDouble(port=port) as server:
                await waiting
                assert len(server.requests) == 1
                await sandbox.close()

    asyncio.run(test())
    assert [told["event"] for told in logs] == ["waiting for the sandbox"]
    assert "ConnectError" in logs[0]["reason"]


def test_a_server_that_does_not_come_is_one_line_with_its_address() -> None:
    async def test() -> None:
        async with SandboxDouble() as server:
            pass
        async with SandboxClient(server.url, attempts=1) as sandbox:
            with pytest.raises(UserError) as caught:
                await wait_until_ready(sandbox, SOON, get_logger())
        said = str(caught.value)
        assert said.startswith(f"sandbox 127.0.0.1:{server.port} gives no result within sandbox.wait = 1 s (sandbox ")
        assert "ConnectError" in said
        assert said.endswith("start it (spo-sandbox), or set sandbox.url")

    asyncio.run(test())


def test_a_server_that_never_answers_is_one_line() -> None:
    with pytest.raises(UserError, match=r"gives no result within sandbox.wait = 1 s; start it"):
        wait_for(hangs, seconds=SOON)


def test_a_wrong_token_is_reported_at_once() -> None:
    with pytest.raises(UserError, match=r"status 401: .*no token.*; sandbox.token or sandbox.url must be wrong"):
        wait_for(says(b"no token", status=401))


def test_a_server_without_python_is_one_line() -> None:
    with pytest.raises(UserError, match="the sandbox does not run Python: no such language"):
        wait_for(answers(status="Failed", message="no such language"))


def test_a_server_that_is_full_is_no_reason_not_to_start(logs: list[Any]) -> None:
    assert wait_for(says(b"full", status=503), seconds=SOON) >= 1
    assert [told["event"] for told in logs] == [
        "waiting for the sandbox",
        "the sandbox gave no result within sandbox.wait; going on",
    ]
    assert "status 503: full" in logs[1]["reason"]
