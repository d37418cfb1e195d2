"""Runs one program: starts, drains and times it, kills it if need be, and leaves nothing of it behind."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time
from dataclasses import dataclass, field

from common.keeper import kill_descendants
from sandbox_client.worker import command, limits
from sandbox_client.worker.cgroup import MemoryGroup
from sandbox_client.worker.protocol import WorkerSettings
from sandbox_client.worker.request import Program
from sandbox_client.worker.start import Output, StartedProgram, Starter

CHUNK = 1 << 16
CLOSE_TIMEOUT = 5.0  # seconds for pipes to close once all processes are dead; normally they close at once
NEVER = float("inf")


class RunCancelled(Exception):
    """The caller has cancelled the run, or is gone."""


@dataclass
class ProgramResult:
    """How a program ended. `failure` is set if the sandbox failed, not the program."""

    seconds: float = 0.0
    code: int | None = None
    timed_out: bool = False
    message: str = ""
    failure: str = ""
    stdout: bytes = b""
    stderr: bytes = b""
    files: dict[str, bytes] = field(default_factory=dict)


class ProgramRunner:
    """Runs one program after another.

    Args:
        control: a file descriptor that becomes readable when the running program must stop.
    """

    def __init__(self, settings: WorkerSettings, group: MemoryGroup | None, control: int) -> None:
        self._limits = settings.limits
        self._isolated = settings.bwrap is not None
        self._starter = Starter(settings)
        self._group = group
        self._control = control
        self._oom_score = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)

    def run(self, program: Program, folder: str) -> ProgramResult:
        """Run a program in its work folder and wait until nothing of it is left.

        Raises:
            RunCancelled: the caller has cancelled it, and the program is dead.
            OSError: it could not be started.
        """
        if self._group is not None:
            self._group.begin(program.memory)
        result = ProgramResult()
        started_at = time.monotonic()
        os.write(self._oom_score, b"1000")  # the program is killed before all other processes if memory runs out
        try:
            started = self._starter.start(program, folder)
        finally:
            os.write(self._oom_score, b"0")
        try:
            status = self._follow(started, program, started_at + program.seconds, result)
        finally:
            started.close()
        result.seconds = time.monotonic() - started_at
        result.stdout, result.stderr = started.out.text(), started.err.text()
        result.files = command.fetched_files(bytes(started.fetched.head), program.fetch)
        if self._group is not None and self._group.killed():
            result.message = _over_memory(program)
        if not result.timed_out:
            self._judge(result, status, started)
        return result

    def _follow(self, started: StartedProgram, program: Program, deadline: float, result: ProgramResult) -> int | None:
        """Drain the pipes until the program has ended and they are closed; returns its wait status.

        A cancelled program is killed, and `RunCancelled` raised.
        """
        status: int | None = None
        ended = False
        look = time.monotonic() + limits.INTERVAL
        exited = os.pidfd_open(started.pid)
        open_pipes = len(started.pipes)
        selector = selectors.DefaultSelector()
        try:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(exited, selectors.EVENT_READ)
            for fd, output in started.pipes.items():
                selector.register(fd, selectors.EVENT_READ, output)
            if started.stdin is not None:
                selector.register(started.stdin, selectors.EVENT_WRITE)
            if not self._isolated:
                self._open_gate(started, started.pid, program)
            while open_pipes or not ended:
                now = time.monotonic()
                if now >= deadline and ended:
                    break  # a pipe has not closed although all processes are dead
                if now >= deadline:
                    result.timed_out = True
                    result.message = f"the program did not end within {program.seconds:g} s"
                elif now >= look:
                    look = now + limits.INTERVAL
                    if self._is_over_memory(started, program):
                        result.message = _over_memory(program)
                if result.message and deadline != NEVER and not ended:  # at `NEVER` it has been killed already
                    os.kill(started.pid, signal.SIGKILL)
                    deadline = look = NEVER  # its end is awaited without a limit
                wake = min(deadline, look)
                for key, _ in selector.select(None if wake == NEVER else max(0.0, wake - now)):
                    if isinstance(key.data, Output):
                        open_pipes -= _drained(selector, key.fd, key.data)
                        if key.data is started.status and started.gate is not None:
                            self._open_gate(started, _status_value(started.status, "child-pid"), program)
                    elif key.fd == started.stdin:
                        if started.send_input():
                            selector.unregister(key.fd)
                            started.close_stdin()
                    elif key.fd == exited:
                        selector.unregister(exited)
                        ended, status = True, kill_descendants(started.pid)
                        deadline, look = time.monotonic() + CLOSE_TIMEOUT, NEVER
                    else:
                        raise RunCancelled
        finally:
            if not ended:
                kill_descendants(started.pid)
            selector.close()
            os.close(exited)
        return status

    def _open_gate(self, started: StartedProgram, first: int | None, program: Program) -> None:
        """Limit the first process, once it is known, and let it continue."""
        if first is not None:
            with contextlib.suppress(ProcessLookupError):
                limits.apply(first, self._limits, program)
            started.begin()

    def _is_over_memory(self, started: StartedProgram, program: Program) -> bool:
        """Whether the processes together have used more memory than they may.

        A control group kills one of them; the run ends with it.
        """
        if self._group is not None:
            return self._group.killed()
        return limits.memory_used(started.pid, program.memory, self._starter.disks) > program.memory

    def _judge(self, result: ProgramResult, status: int | None, started: StartedProgram) -> None:
        """Set the program's return code (128 + n for signal n, as in a shell), or why it has none."""
        code = None if status is None else os.waitstatus_to_exitcode(status)
        if self._isolated:
            code = _status_value(started.status, "exit-code")
        elif code is not None and code < 0:
            code = 128 - code
        if code is None and result.message:
            code = 128 + signal.SIGKILL  # it was killed before bubblewrap could report a code
        if code is None:
            error = started.bwrap_err.text().decode()[:500].strip()
            result.failure = error or f"bubblewrap ended with wait status {status}"
        elif code == 128 + signal.SIGXCPU:
            result.timed_out = True
            result.message = "the program used up its CPU time"
        result.code = None if result.timed_out else code


def _drained(selector: selectors.BaseSelector, fd: int, output: Output) -> bool:
    """Read what is there; True at the end of the stream."""
    try:
        data = os.read(fd, CHUNK)
    except BlockingIOError:
        return False
    output.add(data)
    if not data:
        selector.unregister(fd)
    return not data


def _status_value(status: Output, name: str) -> int | None:
    """A number in bubblewrap's messages, one JSON document a line; None if there is none of this name yet."""
    for line in bytes(status.head).splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return int(json.loads(line)[name])
    return None


def _over_memory(program: Program) -> str:
    return f"processes were killed: together they used more than {program.memory >> 20} MB of memory"
