"""What one caller finds out about a server that is gone, all callers know: one knocks, the others need not try."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from common.retry import AskAgain

# Seconds between two attempts to connect. The shortest pause between two attempts of one call: who is alone always
# knocks, and a thousand calls together are not a thousand connections refused in a second.
KNOCK = 0.25


class Outage:
    """Whether a server could be reached when somebody last tried."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.on = False
        self._clock = clock
        self._knock_at = -math.inf
        self._reason = ""

    def check(self) -> None:
        """Raise `AskAgain` with what was found just now; return where it is the caller's turn to try."""
        if not self.on:
            return
        if self._clock() < self._knock_at:
            raise AskAgain(self._reason)
        self._knock_at = self._clock() + KNOCK

    def begins(self, reason: str) -> None:
        """There was no connection to be had."""
        self.on, self._reason, self._knock_at = True, reason, self._clock() + KNOCK

    def ends(self) -> None:
        """The server is there."""
        self.on = False

    async def trace(self, event: str, _: dict[str, Any]) -> None:
        """httpx's trace of a request. A program may take long: others need not wait for the answer to the first."""
        if event == "connection.connect_tcp.complete":
            self.ends()
