"""A circuit breaker: while a server cannot be reached, one call at a time tries to connect, and the others do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from common.network import RetryableError

# Seconds between two attempts to connect. This is the shortest pause between two attempts of one call: a single caller
# always tries, and a thousand callers do not make a thousand failing connections a second.
PROBE_INTERVAL = 0.25


class CircuitBreaker:
    """Whether the last attempt to connect has failed; it is then open."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.is_open = False
        self._clock = clock
        self._probe_at = -math.inf
        self._reason = ""

    def check(self) -> None:
        """Return if the caller may try to connect; else raise `RetryableError` with the reason of the last failure."""
        if not self.is_open:
            return
        if self._clock() < self._probe_at:
            raise RetryableError(self._reason)
        self._probe_at = self._clock() + PROBE_INTERVAL

    def connection_failed(self, reason: str) -> None:
        """Open: no connection could be made."""
        self.is_open, self._reason, self._probe_at = True, reason, self._clock() + PROBE_INTERVAL

    async def trace(self, event: str, _: dict[str, Any]) -> None:
        """httpx's trace of a request. Closes the breaker once there is a connection: the answer may take long."""
        if event == "connection.connect_tcp.complete":
            self.is_open = False
