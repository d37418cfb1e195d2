"""Waits for a sandbox to run a first program, so that what is wrong with it is known before anybody needs it."""

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
    """Have a program run. A server that is not there yet is waited for.

    One that is there and only slow or full, as others may keep it for a while, is no reason not to start.

    Raises:
        UserError: no server or no answer within `seconds`, or one that refuses the request or runs no Python.
    """
    trouble: SandboxUnavailable | None = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return _check(await sandbox.run_code(PROGRAM))
                except RequestRefused as error:
                    raise UserError(f"{error}; sandbox.token or sandbox.url must be wrong") from None
                except SandboxUnavailable as error:
                    if trouble is None:
                        log.warning("waiting for the sandbox", reason=str(error))
                    trouble = error
                await asyncio.sleep(PAUSE)
    except TimeoutError:
        if trouble is None or isinstance(trouble, SandboxUnreachable):
            why = f" ({trouble})" if trouble else ""
            raise UserError(
                f"{sandbox} gives no result within sandbox.wait = {seconds:g} s{why}; start it (spo-sandbox), or set "
                "sandbox.url"
            ) from None
        log.warning("the sandbox gave no result within sandbox.wait; going on", seconds=seconds, reason=str(trouble))


def _check(answer: RunCodeResponse) -> None:
    if answer.status is not Status.SUCCESS:
        result = answer.run_result or answer.compile_result
        said = " ".join(f"{answer.message} {result.stderr if result else ''}".split())[:300]
        raise UserError(f"the sandbox does not run Python: {said or 'it says nothing'}")
