"""Time limits for users' code, enforced whatever that code does, unless it blocks the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from common.log import get_logger

T = TypeVar("T")

CANCEL_SECONDS = 1.0  # that a cancelled call has to end

_abandoned: set[asyncio.Task[object]] = set()  # referenced here, or they might be garbage-collected while they run


class TimedOut(Exception):
    """A call has not ended within its limit."""


async def with_timeout(seconds: float, call: Awaitable[T]) -> T:
    """The result of a call. A call that takes longer is cancelled; one that ignores that is abandoned.

    Cancelling this coroutine cancels the call. A call that cancels itself or tries to end the process only fails.

    Raises:
        TimedOut: it takes longer.
        RuntimeError: it was cancelled by itself, or raised SystemExit or KeyboardInterrupt.
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
    except (SystemExit, KeyboardInterrupt) as error:
        # Raised in a task, they would end the event loop.
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


async def _cancel(task: asyncio.Task[T]) -> None:
    """Cancel a task and wait for its end, but not for long; an error it raises meanwhile is ignored."""
    task.cancel()
    _abandoned.add(task)
    task.add_done_callback(_forget)
    await asyncio.wait({task}, timeout=CANCEL_SECONDS)
    if not task.done():
        get_logger().warning(
            "a call goes on although it was cancelled; it is left to itself", call=repr(task.get_coro())
        )


def _forget(task: asyncio.Task[object]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()
