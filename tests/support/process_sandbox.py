"""A sandbox without isolation: programs run as plain processes. Only for tests of a sandbox's callers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from sandbox_client import CommandRunResult, CommandStatus, RunCodeRequest, RunCodeResponse, Status


def _without_ptrace() -> None:
    """As in a container: root or not, no process may look into another (prctl PR_CAPBSET_DROP, CAP_SYS_PTRACE)."""
    ctypes.CDLL(None).prctl(24, 19, 0, 0, 0)


class ProcessSandbox:
    """Counts what it runs: `requests`, and `most` at a time."""

    def __init__(self) -> None:
        self.requests: list[RunCodeRequest] = []
        self.running = self.most = 0

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            with tempfile.TemporaryDirectory() as folder:
                return await self._run(request, Path(folder))
        finally:
            self.running -= 1

    async def _run(self, request: RunCodeRequest, folder: Path) -> RunCodeResponse:
        program = folder / "program.py"
        program.write_text(request.code, encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(program)),
            cwd=folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_without_ptrace,
        )
        ending = asyncio.create_task(process.communicate((request.stdin or "").encode()))
        too_slow = False
        try:
            await asyncio.wait_for(process.wait(), request.run_timeout)
        except TimeoutError:
            too_slow = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = [text.decode("utf-8", "replace") for text in await ending]
        run = CommandRunResult(
            status=CommandStatus.TIME_LIMIT_EXCEEDED if too_slow else CommandStatus.FINISHED,
            return_code=None if too_slow else process.returncode,
            stdout=stdout,
            stderr=stderr,
        )
        failed = too_slow or process.returncode != 0
        return RunCodeResponse(status=Status.FAILED if failed else Status.SUCCESS, run_result=run)

    async def close(self) -> None: ...


class FixedSandbox(ProcessSandbox):
    """Runs nothing and gives one answer."""

    def __init__(self, **answer: Any) -> None:
        super().__init__()
        self.answer = RunCodeResponse.model_validate(answer)

    async def _run(self, request: RunCodeRequest, folder: Path) -> RunCodeResponse:
        return self.answer
