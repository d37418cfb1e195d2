"""Redis' clock, by which heartbeats go: when it was set, they say nothing."""

from __future__ import annotations

import time
from typing import Any


class ServerClock:
    """Where Redis' clock should stand, by this process's own, which nobody sets."""

    def __init__(self, redis: Any, tolerance: float) -> None:
        """`tolerance`: seconds that a command may need until Redis looks at its clock."""
        self._tolerance = tolerance
        asked = time.monotonic()
        seconds, micros = redis.time()
        self._ahead = seconds + micros / 1e6 - asked  # seconds, of this process's clock

    def expected(self) -> tuple[float, float]:
        """Between which times, in seconds, Redis' clock stands for a command sent now, unless it was set."""
        now = time.monotonic() + self._ahead
        return now - self._tolerance, now + self._tolerance

    def learn(self, seconds: float, asked: float) -> None:
        """Redis' clock stood there when it did the command that was sent at `asked` of this process's clock."""
        # The command was done after it was sent and before now. Readings that took long say less than the others.
        least, most = seconds - time.monotonic(), seconds - asked
        self._ahead = min(max(self._ahead, least), most)
