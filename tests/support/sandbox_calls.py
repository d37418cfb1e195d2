"""Calls of SandboxClient as tests make them: a clock that only sleeping moves, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from sandbox_client import RunCodeRequest, SandboxClient, SandboxUnavailable
from tests.support.sandbox_double import Reply, SandboxDouble

QUICK = RunCodeRequest(code="print(89)", compile_timeout=0.01, run_timeout=0.01)


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


def client(server: SandboxDouble, time: Time | None = None, **options: Any) -> SandboxClient:
    time = time or Time()
    return SandboxClient(server.url, clock=time.clock, sleep=time.sleep, **options)


def run(test: Coroutine[Any, Any, Any]) -> Any:
    """Run a test; a task that is left behind fails it."""

    async def alone() -> Any:
        value = await test
        for _ in range(10):  # generators that were not read to their end are closed by the loop
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return value

    return asyncio.run(alone())


async def outcome(*replies: Reply, request: RunCodeRequest = QUICK, **options: Any) -> tuple[Any, SandboxDouble, Time]:
    """(response or exception, server, time) of one call."""
    moment = Time()
    async with SandboxDouble(*replies) as server, client(server, moment, **options) as sandbox:
        try:
            return await sandbox.run_code(request), server, moment
        except SandboxUnavailable as error:
            return error, server, moment
