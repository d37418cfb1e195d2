"""Wall time of a run, split by what it was spent on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class PhaseTimer:
    """One phase at a time; a phase that is entered again goes on where it stopped."""

    seconds: dict[str, float] = field(default_factory=dict)
    current: str | None = None
    _since: float = 0.0

    def enter(self, name: str | None) -> None:
        """From now on time counts for `name` (None: for nothing)."""
        now = time.monotonic()
        if self.current is not None:
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + now - self._since
        self.current, self._since = name, now

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Count the time of the block for `name`, then go on with what was current."""
        before = self.current
        self.enter(name)
        yield
        self.enter(before)

    def total(self) -> float:
        """Seconds in all phases so far, the current one included."""
        running = time.monotonic() - self._since if self.current is not None else 0.0
        return sum(self.seconds.values()) + running
