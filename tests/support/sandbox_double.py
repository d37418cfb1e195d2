"""A server that follows SandboxFusion's `/run_code` or breaks it as a test says, and calls of SandboxClient to it."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine
from typing import Any

from sandbox_client import RunCodeRequest, SandboxClient, SandboxUnavailable
from tests.support.event_loop import in_event_loop
from tests.support.http_double import Double, Handler, raw, serve

Reply = Callable[[Handler, Any], None]
QUICK = RunCodeRequest(code="print(89)", compile_timeout=0.01, run_timeout=0.01)


def result(**fields: Any) -> dict[str, Any]:
    """An answer with all published fields, and some of a later version; `run_status` is the status of the run."""
    run = {"status": fields.pop("run_status", "Finished"), "execution_time": 0.0123, "peak_memory_MB": 12.5}
    run |= {"return_code": fields.pop("return_code", 0), "stdout": fields.pop("stdout", "89\n"), "stderr": ""}
    answer = {"status": "Success", "message": "", "compile_result": None, "run_result": run, "trace_id": "7f"}
    return answer | {"executor_pod_name": None, "files": {}} | fields


def sends(content: bytes) -> Reply:
    """Bytes as they are, and then the end of the connection."""

    def reply(handler: Handler, body: Any) -> None:
        handler.wfile.write(content)
        handler.close_connection = True

    return reply


def says(content: bytes, status: int = 200, **headers: str) -> Reply:
    """A complete HTTP answer, on a connection that stays open."""
    return lambda handler, body: raw(handler, content, status, **headers)


def answers(**fields: Any) -> Reply:
    return says(json.dumps(result(**fields)).encode())


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


def client(server: Double, time: Time | None = None, **options: Any) -> SandboxClient:
    time = time or Time()
    return SandboxClient(server.url, clock=time.clock, sleep=time.sleep, **options)


async def leaving_nothing(test: Coroutine[Any, Any, Any]) -> Any:
    value = await test
    for _ in range(10):  # generators that were not read to their end are closed by the loop
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, left
    return value


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(leaving_nothing(test))


def alone(test: Callable[..., Coroutine[Any, Any, None]]) -> Any:
    """Make a test of a coroutine function; a task that is left behind fails it."""

    @functools.wraps(test)
    async def scene(**fixtures: Any) -> None:
        await leaving_nothing(test(**fixtures))

    return in_event_loop(scene)


async def outcome(*replies: Reply, request: RunCodeRequest = QUICK, **options: Any) -> tuple[Any, Double, Time]:
    """(response or exception, server, time) of one call."""
    moment = Time()
    with serve(*replies) as server:
        async with client(server, moment, **options) as sandbox:
            try:
                return await sandbox.run_code(request), server, moment
            except SandboxUnavailable as error:
                return error, server, moment
