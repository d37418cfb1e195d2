"""Roles of processes, the mode of their files, and their threads."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

MOST_FILES = 1 << 16
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)  # those that ask a process to end
OTHERS = 0o027  # umask: the group may not write, others may do nothing
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


def raise_file_limit(most: int = MOST_FILES) -> int:
    """Let this process, and those it starts, open as many files as the hard limit allows; returns how many.

    Args:
        most: upper bound, because some programs iterate over all descriptors up to the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        soft = max(soft, most if hard == resource.RLIM_INFINITY else min(hard, most))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return most if soft == resource.RLIM_INFINITY else soft


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, but in another thread if this one has a running event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def keep_files_private() -> None:
    """Create files as 0640 or stricter from now on, folders as 0750; processes started later do the same.

    Files of a run hold prompts, answers and weights, which only their owner and its group may read.
    """
    os.umask(os.umask(OTHERS) | OTHERS)


def ending(code: int) -> str:
    """How a process ended, given its return code: `SIGKILL` or `exit code 1`."""
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"


@contextmanager
def leaving_no_trace() -> Iterator[None]:
    """Restore the environment and the handlers of `SIGNALS` after the block.

    Libraries change both, and the process may be a notebook that continues.
    """
    environment, handlers = dict(os.environ), {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # no other can set handlers
            for number, handler in handlers.items():
                if handler is not None:  # it is None if it was set in C
                    signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environment)


async def in_thread(call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Run one of the process's own blocking calls in a thread, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(call, *arguments, **named))
