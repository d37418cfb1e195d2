"""Runs model-written code in isolation: the client of SandboxFusion's API, the isolated runner, and `spo-sandbox`.

`client.py` calls a server that speaks SandboxFusion's API, `local.py` and `worker/` run programs isolated on this
machine, and `server.py` serves that runner with the same API.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from common.config import SandboxConfig
from common.errors import UserError
from common.files import read_secret
from sandbox_client.client import SandboxClient
from sandbox_client.types import (
    CommandRunResult,
    CommandStatus,
    RequestRefused,
    RunCodeRequest,
    RunCodeResponse,
    Sandbox,
    SandboxUnavailable,
    SandboxUnreachable,
    Status,
)

__all__ = [
    "CommandRunResult",
    "CommandStatus",
    "RequestRefused",
    "RunCodeRequest",
    "RunCodeResponse",
    "Sandbox",
    "SandboxClient",
    "SandboxUnavailable",
    "SandboxUnreachable",
    "Status",
    "make_sandbox",
    "run_code",
    "wait_until_ready",
]

TOKEN_VARIABLE = "SPO_SANDBOX_TOKEN"
FIRST_PROGRAM = RunCodeRequest(code="print(6 * 7)")
PAUSE = 1.0  # seconds between calls, each of which has attempts and pauses of its own


def make_sandbox(config: SandboxConfig) -> Sandbox:
    """Return a client of the server at `sandbox.url`, or without a URL this machine's isolated runner.

    Raises:
        UserError: the URL or the token cannot be used, or this machine cannot isolate programs.
    """
    if config.url is not None:
        token = config.token or os.environ.get(TOKEN_VARIABLE)
        if config.token_file is not None:
            token = read_secret(config.token_file, "sandbox.token_file")
        return SandboxClient(config.url, token=token, concurrency=config.concurrency)
    # Imported only if programs run on this machine.
    from sandbox_client.isolation import check_isolation_once
    from sandbox_client.local import LocalSandbox
    from sandbox_client.settings import Settings

    # More programs than cores would slow each other into their time limits.
    settings = Settings(workers=min(config.concurrency, os.cpu_count() or 1), memory_mb=config.memory_mb)
    check_isolation_once(settings)
    return LocalSandbox(settings)


async def wait_until_ready(sandbox: Sandbox, seconds: float, log: Any) -> None:
    """Run a first program, and wait for a server that does not answer yet.

    A server that is only slow or full is not an error: other generators may keep it busy for a while.

    Raises:
        UserError: no server answers within `seconds`, or it refuses the request or does not run Python.
    """
    from sandbox_client.local import LocalSandbox

    if isinstance(sandbox, LocalSandbox) and (unbounded := sandbox.unbounded()):
        log.warning(unbounded)
    failure: SandboxUnavailable | None = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return _check_ran(await sandbox.run_code(FIRST_PROGRAM))
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
        log.warning("the sandbox gave no result within sandbox.wait; continuing", seconds=seconds, reason=str(failure))


def _check_ran(answer: RunCodeResponse) -> None:
    if answer.status is not Status.SUCCESS:
        result = answer.run_result or answer.compile_result
        output = " ".join(f"{answer.message} {result.stderr if result else ''}".split())[:300]
        raise UserError(f"the sandbox does not run Python: {output or 'no reason given'}")


def run_code(
    code: str,
    language: str = "python",
    *,
    url: str | None = None,
    token: str | None = None,
    stdin: str | None = None,
    compile_timeout: float = 10.0,
    run_timeout: float = 10.0,
    memory_mb: int = 1024,
    files: Mapping[str, str | None] | None = None,
    fetch_files: Sequence[str] = (),
) -> RunCodeResponse:
    """Run one program and wait for its result; for scripts, outside of an event loop.

    Args:
        url: the server; without one, the isolated runner of this machine.
        compile_timeout, run_timeout: wall time in seconds.
        memory_mb: memory of all processes together, in MiB.
        files: content in base64, by path.
        fetch_files: paths whose content is returned in `files` of the response, in base64.

    Raises:
        SandboxUnavailable: there is no result, for reasons that are not the program's.
        UserError: the URL or the token cannot be used.
    """
    request = RunCodeRequest(
        code=code,
        language=language,
        stdin=stdin,
        compile_timeout=compile_timeout,
        run_timeout=run_timeout,
        memory_limit_MB=memory_mb,
        files=dict(files or {}),
        fetch_files=list(fetch_files),
    )

    async def once() -> RunCodeResponse:
        sandbox = make_sandbox(SandboxConfig(url=url, token=token))
        try:
            return await sandbox.run_code(request)
        finally:
            await sandbox.close()

    return asyncio.run(once())
