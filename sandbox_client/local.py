"""Programs on this machine, each isolated by bubblewrap, in worker processes of their own.

The event loop only sends a request to a worker and awaits its answer: starting, draining, timing and killing happen
in the worker (`sandbox_client.worker`), so no program, however it behaves, holds up the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.process import ending
from sandbox_client.settings import Settings, resolve
from sandbox_client.types import (
    CommandRunResult,
    CommandStatus,
    RequestRefused,
    RunCodeRequest,
    RunCodeResponse,
    SandboxUnavailable,
    Status,
)
from sandbox_client.worker import cgroup, protocol
from sandbox_client.worker.protocol import WorkerSettings

# A worker runs without site-packages (-S), so it cannot import this package's __init__, which needs HTTP and pydantic:
# a bare module of the same name replaces it. The worker then starts in 30 ms instead of half a second.
WORKER_CODE = (
    "import sys, types; sys.path.insert(0, sys.argv[1]); package = types.ModuleType('sandbox_client'); "
    "package.__path__ = [sys.argv[1] + '/sandbox_client']; sys.modules['sandbox_client'] = package; "
    "from sandbox_client.worker.main import main; main()"
)
NUMBERS = itertools.count()  # sandboxes of this process
UNBOUNDED = (
    "no control group limits programs here: their memory is measured every 50 ms, and what the kernel keeps for them "
    "(locks, mappings, pipes) is not bounded; start the sandbox where it may create control groups (docs/sandbox.md)"
)
GRACE = 60.0  # seconds beyond a request's own limit after which its worker counts as dead


class WorkerGone(Exception):
    """A worker process ended, or does not answer."""


class SandboxWorker:
    """A worker process and this process's ends of its pipes."""

    def __init__(self, process: asyncio.subprocess.Process, group: Path | None) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._group = group

    async def ask(self, header: dict[str, Any], blobs: tuple[bytes, ...], seconds: float) -> protocol.Message:
        """Send a message and await the answer; raises `WorkerGone` if there is none."""
        try:
            self._stdin.write(protocol.pack(header, blobs))
            async with asyncio.timeout(seconds):
                length = await self._stdout.readexactly(protocol.LENGTH.size)
                answer = json.loads(await self._stdout.readexactly(protocol.LENGTH.unpack(length)[0]))
                return answer, [await self._stdout.readexactly(size) for size in answer.pop("blobs")]
        except TimeoutError:
            raise WorkerGone(f"worker {self._process.pid} did not answer within {seconds:.0f} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerGone(f"worker {self._process.pid} ended ({await self._ending()})") from None

    async def _ending(self) -> str:
        with contextlib.suppress(TimeoutError):
            return ending(await asyncio.wait_for(self._process.wait(), 5))
        return "it closed its connection"

    def stop_program(self) -> None:
        """Have the running program killed; the answer then comes at once."""
        self._stdin.write(protocol.pack({}))

    async def end(self, kill: bool = False) -> None:
        """End the process and what it runs."""
        self._stdin.close()
        with contextlib.suppress(ProcessLookupError):
            # The end of stdin is not enough: a process that this one has forked (such as vLLM's) may hold it open.
            self._process.send_signal(signal.SIGUSR1 if kill else signal.SIGTERM)  # see `keep`
        try:
            async with asyncio.timeout(GRACE):
                await self._process.wait()
        except TimeoutError:
            self._process.send_signal(signal.SIGUSR1)
            await self._process.wait()
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._group.rmdir()


class LocalSandbox:
    """Runs programs in workers, which start when first needed and stay until `close` or the end of `async with`."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.cgroup: Path | None = None
        self._resolved: WorkerSettings | None = None
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()  # worker numbers, most recently used first
        for slot in reversed(range(self.settings.workers)):
            self._free.put_nowait(slot)
        self._workers: dict[int, SandboxWorker] = {}
        self._jobs: set[asyncio.Task[RunCodeResponse]] = set()
        self._cancelled: set[asyncio.Task[RunCodeResponse]] = set()  # their callers have stopped waiting
        self._closed = False
        self._name = f"{cgroup.PREFIX}-{os.getpid()}-{next(NUMBERS)}"

    async def __aenter__(self) -> LocalSandbox:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Find what is needed and start the first worker; raises `UserError` if something is missing."""
        slot = await self._free.get()
        try:
            await self._worker(slot)
        finally:
            self._free.put_nowait(slot)

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        """Wait for a free worker and run a program on it; if the call is cancelled, the program is killed.

        Raises:
            RequestRefused: the language is not known here, or a file cannot be placed or fetched.
            SandboxUnavailable: there is no result, for reasons that are not the program's.
            UserError: the sandbox cannot be started here.
        """
        slot = await self._free.get()
        job = asyncio.ensure_future(self._run(slot, request))
        self._jobs.add(job)
        job.add_done_callback(lambda _: self._release(slot, job))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            self._cancelled.add(job)
            if slot in self._workers and not job.done():
                self._workers[slot].stop_program()
            raise

    def unbounded(self) -> str | None:
        """A warning about resources that are not bounded on this machine; None if all are."""
        return None if cgroup.find(self.settings.cgroup) else UNBOUNDED

    def __str__(self) -> str:
        return "the local sandbox"

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(worker.end() for worker in self._workers.values()))
        await asyncio.gather(*self._jobs, return_exceptions=True)

    def _release(self, slot: int, job: asyncio.Task[RunCodeResponse]) -> None:
        self._jobs.discard(job)
        self._cancelled.discard(job)
        self._free.put_nowait(slot)
        if not job.cancelled():
            job.exception()  # retrieved here, since its caller may be gone; else asyncio logs it

    async def _run(self, slot: int, request: RunCodeRequest) -> RunCodeResponse:
        """Run one request on the slot's worker, which is started first if there is none."""
        try:
            worker = await self._worker(slot)
            if self._closed:
                await worker.end()
                raise WorkerGone("it was closed")
            if asyncio.current_task() in self._cancelled:
                raise SandboxUnavailable("the run was cancelled")
            seconds = min(request.run_timeout, self.settings.seconds) + GRACE
            header, blobs = await worker.ask({}, (request.model_dump_json().encode(),), seconds)
        except (WorkerGone, OSError) as error:
            if dead := self._workers.pop(slot, None):
                await dead.end(kill=True)
            raise SandboxUnavailable(f"the local sandbox failed: {error}") from None
        return _response(header, blobs)

    async def _resolve(self) -> WorkerSettings:
        if self._closed:
            raise SandboxUnavailable("the local sandbox is closed")
        if self._resolved is None:
            self._resolved = await asyncio.to_thread(resolve, self.settings)
            self.cgroup = cgroup.find(self.settings.cgroup)
            if self.cgroup is None and self.settings.cgroup not in ("auto", "none"):
                raise UserError(f"no control group for memory can be made in {self.settings.cgroup!r}")
            if self.cgroup is None and self.settings.endpoint is not None:
                raise UserError(
                    "programs that reach an endpoint need a control group, which counts the memory of their "
                    "connections; start this where it may create control groups (docs/sandbox.md)"
                )
        return self._resolved

    async def _worker(self, slot: int) -> SandboxWorker:
        """The slot's worker, started if there is none; raises `UserError` if it cannot run here, or `WorkerGone`."""
        if slot in self._workers:
            return self._workers[slot]
        resolved = await self._resolve()
        group = self.cgroup / f"{self._name}-{slot}" if self.cgroup else None
        resolved = dataclasses.replace(
            resolved,
            group=str(group) if group else None,
            uid=None if resolved.uid is None else resolved.uid + slot,
        )
        project = str(Path(__file__).resolve().parent.parent)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", WORKER_CODE, project, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        worker = SandboxWorker(process, group)
        try:
            answer, _ = await worker.ask({"settings": dataclasses.asdict(resolved)}, (), GRACE)
        except WorkerGone:
            await worker.end(kill=True)
            raise
        if "error" in answer:
            await worker.end()
            raise UserError(f"the local sandbox cannot start: {answer['error']}")
        self._workers[slot] = worker
        return worker


def _response(header: dict[str, Any], blobs: list[bytes]) -> RunCodeResponse:
    """A worker's answer as a `RunCodeResponse`; raises `RequestRefused` or `SandboxUnavailable` if it has none."""
    if reason := header.get("refused"):
        # The request is at fault, and no program ran: there is nothing to score.
        raise RequestRefused(f"the local sandbox refuses the request: {reason}")
    if failure := header.get("failure"):
        raise SandboxUnavailable(f"the local sandbox failed: {failure}")
    result = CommandRunResult(
        status=CommandStatus.TIME_LIMIT_EXCEEDED if header["timed_out"] else CommandStatus.FINISHED,
        execution_time=header["seconds"],
        return_code=header["code"],
        stdout=blobs[0].decode(),
        stderr=blobs[1].decode(),
    )
    return RunCodeResponse(
        status=Status.SUCCESS if header["code"] == 0 else Status.FAILED,
        message=header["message"],
        run_result=result,
        files={name: data.decode() for name, data in zip(header["files"], blobs[2:], strict=True)},
    )
