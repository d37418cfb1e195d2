"""Waits until a sandbox has run a first program, so that problems are known before it is needed."""

from __future__ import annotations

import asyncio
from typing import Any

from common.errors import UserError
from sandbox_client.types import (
    RequestRefused,
    RunCodeRequest,
    RunCodeResponse,
    Sandbox,
    SandboxUnavailable,
    SandboxUnreachable,
    Status,
)

PROGRAM = RunCodeRequest(code="print(6 * 7)")
PAUSE = 1.0  # seconds between calls, each of which has attempts and pauses of its own


async def wait_until_ready(sandbox: Sandbox, seconds: float, log: Any) -> None:
    """Run a first program, and wait for a server that does not answer yet.

    A server that is only slow or full is no error: other generators may keep it busy for a while.

    Raises:
        UserError: no server or no answer within `seconds`, or one that refuses the request or runs no Python.
    """
    failure: SandboxUnavailable | None = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return _check(await sandbox.run_code(PROGRAM))
                except RequestRefused as error:
                    raise UserError(f"{error}; sandbox.token or sandbox.url must be wrong") from None
                except SandboxUnavailable as error:
                    if failure is None:
                        log.warning("waiting for the sandbox", reason=str(error))
                    failure = error
                await asyncio.sleep(PAUSE)
    except TimeoutError:
        if failure is None or isinstance(failure, SandboxUnreachable):
            why = f" ({failure})" if failure else ""
            raise UserError(
                f"{sandbox} gives no result within sandbox.wait = {seconds:g} s{why}; start it (spo-sandbox), or set "
                "sandbox.url"
            ) from None
        log.warning("the sandbox gave no result within sandbox.wait; going on", seconds=seconds, reason=str(failure))


def _check(answer: RunCodeResponse) -> None:
    if answer.status is not Status.SUCCESS:
        result = answer.run_result or answer.compile_result
        output = " ".join(f"{answer.message} {result.stderr if result else ''}".split())[:300]
        raise UserError(f"the sandbox does not run Python: {output or 'it says nothing'}")
