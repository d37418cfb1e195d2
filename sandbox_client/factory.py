"""The sandbox a configuration names, and a call for scripts that need just one result."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

from common.config import SandboxConfig
from common.files import read_secret
from sandbox_client.client import SandboxClient
from sandbox_client.types import RunCodeRequest, RunCodeResponse, Sandbox

TOKEN_VARIABLE = "SPO_SANDBOX_TOKEN"


def make_sandbox(config: SandboxConfig) -> Sandbox:
    """The server at `sandbox.url`, or without one the isolated runner of this machine.

    Raises:
        UserError: the URL or the token cannot be used, or this machine cannot isolate programs.
    """
    if config.url is not None:
        return SandboxClient(
            config.url,
            token=_token(config),
            concurrency=config.concurrency,
            timeout=config.timeout,
            attempts=config.attempts,
        )
    # Only here is it known that programs run on this machine.
    from sandbox_client.isolation import check_isolation_once
    from sandbox_client.local import LocalSandbox
    from sandbox_client.settings import Limits, Settings

    # More programs than cores would slow each other into their time limits.
    concurrency = min(config.concurrency, os.cpu_count() or 1)
    settings = Settings(concurrency=concurrency, limits=Limits(memory_mb=config.memory_mb))
    check_isolation_once(settings)
    return LocalSandbox(settings)


def _token(config: SandboxConfig) -> str | None:
    """What the configuration names, else the environment."""
    if config.token_file is not None:
        return read_secret(config.token_file, "sandbox.token_file")
    return config.token or os.environ.get(TOKEN_VARIABLE)


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
        files: content by path, base64.

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
