"""Closing what an episode opened, whatever happens to the episode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from common.log import get_logger
from generator.concurrency.timeout import TimedOut, with_timeout

CLOSE_SECONDS = 5.0  # longer ones are cancelled, because a cancelled episode, and so a stop, waits for them


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
            await asyncio.wait(closing)  # unlike gather, it does not hand the cancellation on
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
