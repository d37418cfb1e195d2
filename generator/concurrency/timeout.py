"""Time limits for code of others, which hold whatever it does, short of blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from common.log import get_logger

T = TypeVar("T")

PARTING = 1.0  # seconds that what is cancelled has to end

_left: set[asyncio.Task[object]] = set()  # referred to here, or they might vanish in the middle


class TimedOut(Exception):
    """A call has not ended within its limit."""


async def with_timeout(seconds: float, call: Awaitable[T]) -> T:
    """What a call gives. One that takes longer is cancelled; if it goes on all the same, it is left to itself.

    Cancelled, it cancels the call. Neither a call that cancels itself nor one that wants to end the process does more
    than fail.

    Raises:
        TimedOut: it takes longer.
        RuntimeError: it was cancelled by itself, or raised SystemExit or KeyboardInterrupt.
        Exception: whatever the call raises.
    """
    task = asyncio.ensure_future(_tamed(call))
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _end(task)
        raise
    if not task.done():
        await _end(task)
        raise TimedOut
    if task.cancelled():
        raise RuntimeError("it was cancelled from within")
    return task.result()


async def _tamed(call: Awaitable[T]) -> T:
    try:
        return await call
    except (SystemExit, KeyboardInterrupt) as error:
        # Raised in a task, they would end the event loop.
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


async def _end(task: asyncio.Task[T]) -> None:
    """Cancel a task and wait a little; also one that fails meanwhile, as nobody wants to know any more."""
    task.cancel()
    _left.add(task)
    task.add_done_callback(_forget)
    await asyncio.wait({task}, timeout=PARTING)
    if not task.done():
        get_logger().warning(
            "a call goes on although it was cancelled; it is left to itself", call=repr(task.get_coro())
        )


def _forget(task: asyncio.Task[object]) -> None:
    _left.discard(task)
    if not task.cancelled():
        task.exception()
