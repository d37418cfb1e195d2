"""How fast a run's steps follow one another, and so when it will be over."""

from __future__ import annotations

import time
from collections import deque

WINDOW = 20  # steps that the estimate is of


class Pace:
    """When each of the newest versions was seen."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=WINDOW + 1)

    def see(self, version: int, now: float | None = None) -> None:
        """A version is there; those that were there before this process looked say nothing."""
        if not self._seen or version != self._seen[-1][1]:
            self._seen.append((time.monotonic() if now is None else now, version))

    def left(self, steps: int, now: float | None = None) -> float | None:
        """Seconds until the last step at the pace of the newest ones; None before there are two."""
        # A learner that came back from its checkpoint announces versions again.
        while len(self._seen) > 1 and self._seen[0][1] >= self._seen[-1][1]:
            self._seen.popleft()
        if len(self._seen) < 2:
            return None
        (began, first), (newest, version) = self._seen[0], self._seen[-1]
        rest = (newest - began) / (version - first) * (steps - version)
        return max(0.0, rest - ((time.monotonic() if now is None else now) - newest))


def duration(seconds: float) -> str:
    """As people say it: `40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
