"""Keeps the event loop free: long work in a thread, time limits for users' code, and a watchdog."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from common.log import get_logger

T = TypeVar("T")

# Longer texts take more than a few milliseconds to tokenise or to search.
LONG_TOKENS = 2048
LONG_TEXT = 4096  # characters
SWITCH_SECONDS = 0.001
CANCEL_SECONDS = 1.0  # a cancelled call has this long to end
CLOSE_SECONDS = 5.0  # a closer that takes longer is cancelled, since a stop waits for it
STALL_SECONDS = 60.0
LEAVE_SECONDS = 5.0

# One thread: more would only compete for the interpreter's lock, with each other and with the event loop.
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="long-text")
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
_abandoned: set[asyncio.Task[object]] = set()  # referenced here, or they might be garbage-collected while they run


async def offload(long: bool, work: Callable[..., T], *arguments: Any) -> T:
    """Return `work(*arguments)`, computed in a thread if it is `long`, else here."""
    loop = asyncio.get_running_loop()
    if long:
        return await loop.run_in_executor(_THREAD, work, *arguments)
    # One engine step may end a hundred turns; only one of them is processed in each round of the event loop.
    async with _turns.setdefault(loop, asyncio.Lock()):
        await asyncio.sleep(0)
        return work(*arguments)


def tune_interpreter() -> None:
    """Tune thread switching and garbage collection, once everything is loaded. Blocks for tenths of a second.

    With Python's defaults a thread keeps the interpreter's lock for 5 ms each time the event loop waits for it, and
    each garbage collection visits all of vLLM's objects.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()


class TimedOut(Exception):
    """A call has not ended within its limit."""


async def with_timeout(seconds: float | None, call: Awaitable[T]) -> T:
    """Return a call's result. A call that takes longer is cancelled; one that ignores that is abandoned.

    The limit holds whatever the call does, unless it blocks the event loop. Cancelling this coroutine cancels the
    call. A call that cancels itself or tries to end the process only fails.

    Raises:
        TimedOut: it takes longer.
        RuntimeError: it cancelled itself, or raised something other than an `Exception`, such as `SystemExit`.
        Exception: whatever the call raises.
    """
    task = asyncio.ensure_future(_contained(call))
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    if not task.done():
        await _cancel(task)
        raise TimedOut
    if task.cancelled():
        raise RuntimeError("it was cancelled from within")
    return task.result()


async def _contained(call: Awaitable[T]) -> T:
    try:
        return await call
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        # Callers expect an `Exception`. In a task, SystemExit and KeyboardInterrupt would even end the event loop.
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


async def _cancel(task: asyncio.Task[T]) -> None:
    """Cancel a task and wait for its end, but not for long; an error that it raises then is ignored."""
    task.cancel()
    _abandoned.add(task)
    task.add_done_callback(_forget)
    await asyncio.wait({task}, timeout=CANCEL_SECONDS)
    if not task.done():
        get_logger().warning("a call continues although it was cancelled; it is abandoned", call=repr(task.get_coro()))


def _forget(task: asyncio.Task[object]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()


async def close_all(closers: Mapping[str, Callable[[], Awaitable[object]]]) -> None:
    """Run all closers, each to its end or for `CLOSE_SECONDS`; failures are logged, by name, and change nothing.

    A cancellation is passed on only when all have ended.
    """
    if not closers:
        return
    closing = [asyncio.ensure_future(_close(name, close)) for name, close in closers.items()]
    cancelled: asyncio.CancelledError | None = None
    while not all(task.done() for task in closing):
        try:
            await asyncio.wait(closing)  # unlike gather, it does not cancel the tasks
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _close(name: str, close: Callable[[], Awaitable[object]]) -> None:
    try:
        await with_timeout(CLOSE_SECONDS, close())
    except TimedOut:
        get_logger().warning("could not be closed", what=name, error=f"no end within {CLOSE_SECONDS:g} s")
    except Exception as error:
        get_logger().warning("could not be closed", what=name, error=f"{type(error).__name__}: {error}")


async def watch(seconds: float = STALL_SECONDS) -> None:
    """Until cancelled, crash the process if the event loop is blocked for `seconds`.

    A tool or a simulated user that blocks the loop stops all episodes. A crashed process is started again, and other
    generators take over its tasks. The stack of each thread is written to stderr.
    """
    try:
        while True:
            faulthandler.dump_traceback_later(seconds, exit=True)
            await asyncio.sleep(seconds / 4)
    finally:
        faulthandler.cancel_dump_traceback_later()


def exit_after(code: int, seconds: float = LEAVE_SECONDS) -> None:
    """End the process with this exit code after `seconds`, unless it has ended by then.

    At exit Python waits for every thread, and so for ever if a tool hangs in one.
    """
    ending = threading.Timer(seconds, os._exit, [code])
    ending.daemon = True
    ending.start()
