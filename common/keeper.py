"""Processes that end with their parent and leave nothing. Imports little: a sandbox's worker starts in milliseconds."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WAKES_KEEPER = {signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1}


def die_with_parent(parent_is_alive: Callable[[], bool], how: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends (Linux only).

    A parent that is killed cannot end its children itself.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)
    # If the parent died before the call, the kernel sends no signal.
    if not parent_is_alive():
        os.kill(os.getpid(), how)


def adopt_orphans() -> None:
    """Become the parent of all descendants, daemons too, whose own parents have ended.

    Killing a process group or a session misses processes that have left it; `kill_descendants` then finds them.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def keep(parent: int, descriptors: tuple[int, ...], at_parents_end: signal.Signals) -> None:
    """Continue in a child process; when it ends, everything it has started is ended too.

    The calling process becomes the keeper. It closes the files `descriptors`, which the child keeps, passes SIGTERM on,
    so that the child can clean up, kills it on SIGUSR1, and ends with the child's status. The kernel sends the keeper
    `at_parents_end`, one of these two signals, when its `parent` ends. If the keeper is killed, so is the child.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKES_KEEPER)
    adopt_orphans()
    die_with_parent(lambda: os.getppid() == parent, at_parents_end)
    keeper = os.getpid()
    kept = os.fork()
    if not kept:
        os.setsid()
        die_with_parent(lambda: os.getppid() == keeper)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKES_KEEPER)
        return
    for descriptor in descriptors:
        os.close(descriptor)
    code = os.waitstatus_to_exitcode(_end_of(kept))
    kill_descendants()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core is enough
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKES_KEEPER)
        os.kill(keeper, -code)
    os._exit(code)


def _end_of(kept: int) -> int:
    """Pass signals on to a child until it ends; return its wait status."""
    while True:
        number = signal.sigwait(_WAKES_KEEPER)
        if number != signal.SIGCHLD:
            os.kill(kept, signal.SIGKILL if number == signal.SIGUSR1 else number)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == kept:
                return ended[1]


def kill_descendants(pid: int = 0) -> int | None:
    """Kill all that this process has started, wait until it is gone, and return the wait status of `pid`.

    To be called after `adopt_orphans`. In a sandbox, the namespace's first process ends only after all others in it.
    """
    status: int | None = None
    while True:
        for child in descendants(os.getpid())[1:]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            ended_pid, ended_status = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if ended_pid == pid:
            status = ended_status


def descendants(pid: int) -> list[int]:
    """The process and all its descendants."""
    processes = [pid]
    for parent in processes:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children", "rb") as file:
                    processes += map(int, file.read().split())
        except OSError:
            continue
    return processes
