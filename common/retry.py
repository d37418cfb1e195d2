"""Retries of a request: growing pauses, a deadline, and excerpts of the server's answers for messages."""

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


class RetryableError(Exception):
    """This attempt failed, and the next may succeed; `after` is the pause that the server asks for, in seconds."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class RetriesExhausted(Exception):
    """All attempts failed; the text says how many there were and how the last one failed."""


@dataclass(frozen=True)
class Retries:
    """How often to try, and how long to wait in between.

    Attributes:
        attempts: maximum number of attempts.
        first, longest: pauses in seconds; they double up to the longest, each shortened at random by up to half.
        max_retry_after: longest pause in seconds that a server may ask for.
        clock, sleep: time in seconds, for tests.
    """

    attempts: int
    first: float
    longest: float
    max_retry_after: float = math.inf
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep

    async def __call__(self, attempt: Callable[[], Awaitable[T]], seconds: float | None = None) -> T:
        """The result of the first attempt that does not raise `RetryableError` or `TimeoutError`.

        Args:
            seconds: for all attempts and the pauses between them; None: no limit.

        Raises:
            RetriesExhausted: all attempts failed.
            Exception: any other exception of an attempt.
        """
        deadline = math.inf if seconds is None else self.clock() + seconds
        count = 0
        while True:
            count += 1
            try:
                async with asyncio.timeout(None if seconds is None else deadline - self.clock()):
                    return await attempt()
            except TimeoutError:
                reason, after = "no answer in time", 0.0
            except RetryableError as error:
                reason, after = str(error), min(error.after, self.max_retry_after)
            pause = max(after, min(self.longest, self.first * 2 ** (count - 1)) * random.uniform(0.5, 1.0))
            if count >= self.attempts or self.clock() + pause >= deadline:
                raise RetriesExhausted(f"no result in {count} attempts; last: {reason}")
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
