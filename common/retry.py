"""Asking a server again: pauses that grow, a deadline, and what of its answers may stand in a message."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar

from common.text import one_line

T = TypeVar("T")
MAX_REASON = 300  # characters of a server's text that reach a message


class AskAgain(Exception):
    """This attempt brought nothing, the next may; `after` is the server's wish in seconds."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class GaveUp(Exception):
    """No attempt brought anything; the text says how many there were and how the last one failed."""


@dataclass(frozen=True)
class Retries:
    """How often to ask, and how long to wait in between.

    Attributes:
        attempts: at most.
        first, longest: seconds between attempts; they double from the one to the other, less up to half by chance.
        max_retry_after: most seconds that a server may ask to wait.
        clock, sleep: time in seconds, for tests.
    """

    attempts: int
    first: float
    longest: float
    max_retry_after: float = math.inf
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep

    async def __call__(self, attempt: Callable[[], Awaitable[T]], seconds: float | None = None) -> T:
        """What the first attempt brings that does not raise `AskAgain` or `TimeoutError`.

        Args:
            seconds: for all attempts and the pauses between them; None: no limit.

        Raises:
            GaveUp: there was none.
            Exception: whatever else an attempt raises.
        """
        stop_at = math.inf if seconds is None else self.clock() + seconds
        made = 0
        while True:
            made += 1
            try:
                async with asyncio.timeout(None if seconds is None else stop_at - self.clock()):
                    return await attempt()
            except TimeoutError:
                reason, after = "no answer in time", 0.0
            except AskAgain as failed:
                reason, after = str(failed), min(failed.after, self.max_retry_after)
            pause = max(after, min(self.longest, self.first * 2 ** (made - 1)) * random.uniform(0.5, 1.0))
            if made >= self.attempts or self.clock() + pause >= stop_at:
                raise GaveUp(f"no result in {made} attempts; last: {reason}")
            await self.sleep(pause)


async def read(chunks: AsyncIterator[bytes], limit: int) -> bytes:
    """At most `limit` bytes of an answer."""
    content = bytearray()
    async for chunk in chunks:
        content += chunk[: limit - len(content)]
        if len(content) >= limit:
            break
    return bytes(content)


def retry_after(value: str) -> float:
    """Seconds of a Retry-After header: a number or a date; 0 where it is neither."""
    with contextlib.suppress(ValueError, OverflowError):
        return max(0.0, float(int(value)))
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def excerpt(text: str | bytes) -> str:
    """The beginning of a server's text as one short line."""
    head = text[: 4 * MAX_REASON]
    if isinstance(head, bytes):
        head = head.decode("utf-8", "replace")
    return one_line(head)[:MAX_REASON] or "(nothing)"
