"""Roles of processes, the mode of their files, their threads, and when they end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

OTHERS = 0o027  # umask: the group may not write, others may do nothing
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WAKES_KEEPER = {signal.SIGCHLD, signal.SIGTERM}
# asyncio's default threads run the code of tools, simulated users and rewards, which may hang and never return its
# thread. The calls that a process depends on must not wait behind it.
_THREADS = ThreadPoolExecutor(16, thread_name_prefix="own")


class Role(StrEnum):
    """The processes of a run, and the sandbox."""

    SAMPLER = "sampler"
    GENERATOR = "generator"
    LEARNER = "learner"
    RELAY = "relay"
    SANDBOX = "sandbox"


def keep_files_private() -> None:
    """Create files as 0640 or stricter from now on, folders as 0750; processes started later do the same.

    Files of a run hold prompts, answers and weights, which only their owner and its group may read.
    """
    os.umask(os.umask(OTHERS) | OTHERS)


def die_with_parent(parent_is_alive: Callable[[], bool], how: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux only).

    A parent that is killed cannot end its children itself.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)
    # If the parent died before the call, no signal comes any more.
    if not parent_is_alive():
        os.kill(os.getpid(), how)


def keep(parent: int, descriptor: int) -> None:
    """Go on in a new process, of which nothing is left once it ends, this one is sent SIGTERM, or its `parent` ends.

    This process stays behind as the keeper, ends as the new one did, and leaves it the file `descriptor`. Killing a
    process group or a session misses what has left it. But the kernel gives orphans to the nearest ancestor that asks
    for them: what the new process has started, daemons too, is below the keeper for as long as it runs.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKES_KEEPER)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    die_with_parent(lambda: os.getppid() == parent, signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the keeper would dump one more
    keeper = os.getpid()
    kept = os.fork()
    if not kept:
        os.setsid()
        die_with_parent(lambda: os.getppid() == keeper)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKES_KEEPER)
        return
    os.close(descriptor)
    code = os.waitstatus_to_exitcode(_outlive(kept))
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKES_KEEPER)
        os.kill(keeper, -code)
    os._exit(code)


def _outlive(kept: int) -> int:
    """Wait for the end of a child, or for SIGTERM; kill all descendants; return the child's wait status."""
    status = None
    with contextlib.suppress(ChildProcessError):  # none is left
        while status is None and signal.sigwait(_WAKES_KEEPER) == signal.SIGCHLD:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            while pid:
                status = ended if pid == kept else status
                pid, ended = os.waitpid(-1, os.WNOHANG)
        while True:
            # The children of each that dies become children of this process.
            for child in Path("/proc/thread-self/children").read_text(encoding="ascii").split():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(child), signal.SIGKILL)
            pid, ended = os.wait()
            status = ended if pid == kept else status
    assert status is not None
    return status


async def in_thread(call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Run one of the process's own blocking calls in a thread, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(call, *arguments, **named))
