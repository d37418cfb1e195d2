"""One program from start to end: started, drained, timed, killed if need be, and nothing of it left."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from sandbox_client.settings import Resolved
from sandbox_client.worker import fetch_files, memory, rlimits
from sandbox_client.worker.cgroup import Group
from sandbox_client.worker.output import Output
from sandbox_client.worker.request import Request
from sandbox_client.worker.start import Child, Starter, StdinFeed

CHUNK = 1 << 16
CLOSE_TIMEOUT = 5.0  # seconds for pipes to close once all processes are dead; normally they close at once
NEVER = float("inf")


class Stopped(Exception):
    """The caller has cancelled the run, or is gone."""


@dataclass
class Result:
    """How a program ended. `failure` is set where the sandbox failed, not the program."""

    seconds: float = 0.0
    code: int | None = None
    timed_out: bool = False
    message: str = ""
    failure: str = ""
    stdout: bytes = b""
    stderr: bytes = b""
    files: dict[str, bytes] = field(default_factory=dict)


class Runner:
    """Runs one program after another."""

    def __init__(self, settings: Resolved, group: Group | None, control: int) -> None:
        self.limits = settings.limits
        self.isolated = settings.bwrap is not None
        self.starter = Starter(settings)
        self.group = group
        self.control = control  # file descriptor; readable while a program runs means: stop it
        self.score = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)

    def run(self, request: Request, folder: str) -> Result:
        """Run a program in its work folder and wait until nothing of it is left.

        Raises:
            Stopped: it was cancelled; the program is dead.
            OSError: it could not be started.
        """
        if self.group is not None:
            self.group.begin(request.memory)
        result = Result()
        started = time.monotonic()
        with self.preferred_victim():
            child = self.starter.start(request, folder)
        try:
            status = self.follow(child, request, started + request.seconds, result)
        finally:
            child.close()
        result.seconds = time.monotonic() - started
        result.stdout, result.stderr = child.out.text(), child.err.text()
        result.files = fetch_files.unpack(bytes(child.fetched.head), request.fetch)
        if self.group is not None and self.group.killed():
            result.message = over_memory(request)
        if not result.timed_out:
            self.judge(result, status, child)
        return result

    def open_gate(self, child: Child, first: int | None, request: Request) -> None:
        """Limit the first process, once it is known, and let it go on."""
        if first is not None:
            with contextlib.suppress(ProcessLookupError):
                rlimits.apply(first, self.limits, request)
            child.begin()

    def over(self, child: Child, request: Request) -> bool:
        """Whether the processes together have used more memory than they may.

        A control group kills one of them; the run ends with it.
        """
        if self.group is not None:
            return self.group.killed()
        return memory.used(child.pid, request.memory, self.starter.disks) > request.memory

    def judge(self, result: Result, status: int | None, child: Child) -> None:
        """The program's return code: 128 + n for signal n, as a shell has it."""
        code = None if status is None else os.waitstatus_to_exitcode(status)
        if self.isolated:
            code = status_value(child.status, "exit-code")
        elif code is not None and code < 0:
            code = 128 - code
        if code is None and result.message:
            code = 128 + signal.SIGKILL
        if code is None:
            error = child.bwrap_err.text().decode()[:500].strip()
            result.failure = error or f"bubblewrap ended with wait status {status}"
        elif code == 128 + signal.SIGXCPU:
            result.timed_out = True
            result.message = "the program used up its CPU time"
        result.code = None if result.timed_out else code

    @contextlib.contextmanager
    def preferred_victim(self) -> Iterator[None]:
        """What is started in here is the first to go when memory runs out, before this process and any other."""
        os.write(self.score, b"1000")
        try:
            yield
        finally:
            os.write(self.score, b"0")

    def follow(self, child: Child, request: Request, deadline: float, result: Result) -> int | None:
        """Drain the pipes until the program has ended and they are closed; returns its wait status.

        Raises:
            Stopped: it was cancelled.
        """
        status: int | None = None
        ended = False
        look = time.monotonic() + memory.INTERVAL
        exited = os.pidfd_open(child.pid)
        left = len(child.pipes)
        selector = selectors.DefaultSelector()
        try:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(exited, selectors.EVENT_READ)
            for fd, output in child.pipes.items():
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ, output)
            if child.feed is not None and not child.feed.push():
                selector.register(child.feed.fd, selectors.EVENT_WRITE, child.feed)
            elif child.feed is not None:
                child.close_feed()
            if not self.isolated:
                self.open_gate(child, child.pid, request)
            while left or not ended:
                now = time.monotonic()
                if now >= deadline and ended:
                    break
                if now >= deadline:
                    result.timed_out = True
                    result.message = f"the program did not end within {request.seconds:g} s"
                    os.kill(child.pid, signal.SIGKILL)
                    deadline = look = NEVER
                elif now >= look:
                    look = now + memory.INTERVAL
                    if self.over(child, request):
                        result.message = over_memory(request)
                        os.kill(child.pid, signal.SIGKILL)
                        deadline = look = NEVER
                wake = min(deadline, look)
                for key, _ in selector.select(None if wake == NEVER else max(0.0, wake - now)):
                    if isinstance(key.data, Output):
                        left -= drained(selector, key.fd, key.data)
                        if key.data is child.status and child.gate is not None:
                            self.open_gate(child, status_value(child.status, "child-pid"), request)
                    elif isinstance(key.data, StdinFeed):
                        if key.data.push():
                            selector.unregister(key.fd)
                            child.close_feed()
                    elif key.fd == exited:
                        selector.unregister(exited)
                        ended, status = True, end(child.pid)
                        deadline, look = time.monotonic() + CLOSE_TIMEOUT, NEVER
                    else:
                        raise Stopped
        finally:
            if not ended:
                end(child.pid)
            selector.close()
            os.close(exited)
        return status


def drained(selector: selectors.BaseSelector, fd: int, output: Output) -> bool:
    """Read what is there; True at the end of the stream."""
    try:
        data = os.read(fd, CHUNK)
    except BlockingIOError:
        return False
    output.add(data)
    if not data:
        selector.unregister(fd)
    return not data


def end(pid: int) -> int | None:
    """Kill all that was started, wait until it is gone, and return the wait status of `pid`.

    We are the subreaper: what a program leaves behind is our child as soon as its own parent is dead. In a sandbox that
    is the first process of the namespace; it ends when all others in there have.
    """
    status: int | None = None
    while True:
        for child in memory.descendants(os.getpid())[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            ended_pid, ended_status = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if ended_pid == pid:
            status = ended_status


def status_value(status: Output, name: str) -> int | None:
    """A number in bubblewrap's messages, one JSON document a line; None if there is none of this name yet."""
    for line in bytes(status.head).splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return int(json.loads(line)[name])
    return None


def over_memory(request: Request) -> str:
    return f"processes were killed: together they used more than {request.memory >> 20} MB of memory"
