"""Redis' clock, by which the idle times of leased tasks go: when it was set, they say nothing."""

from __future__ import annotations

import time
from typing import Any


class ClockWatch:
    """Compares Redis' clock with this process's own, which nobody sets.

    Attributes:
        changes: how often Redis' clock was set since this object was made.
    """

    def __init__(self, redis: Any, tolerance: float) -> None:
        """`tolerance`: seconds that may be lost between the two readings."""
        self.changes = 0
        self._redis, self._tolerance = redis, tolerance
        self._ahead = self._read()[0]

    def check(self) -> int:
        """Compare the clocks once more; returns `changes`."""
        least, most = self._read()
        if most < self._ahead - self._tolerance or least > self._ahead + self._tolerance:
            self.changes += 1
            self._ahead = least
        # Readings that took long say less than the others.
        self._ahead = min(max(self._ahead, least), most)
        return self.changes

    def _read(self) -> tuple[float, float]:
        """Between how many seconds Redis' clock is ahead of this process's: it was read at some time of the call."""
        before = time.monotonic()
        seconds, micros = self._redis.time()
        after = time.monotonic()
        server: float = seconds + micros / 1e6
        return server - after, server - before
