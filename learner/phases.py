"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from common.log import Timeline


class Phases:
    """Seconds spent in each phase of a step, which are noted on a timeline."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._timeline = timeline or Timeline(None, "")
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`."""
        began, start = time.time(), time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.seconds[name] += seconds
            self._timeline.slice(name, began, began + seconds, lane="step")

    def metrics(self) -> dict[str, float]:
        """`seconds/<phase>`."""
        return {f"seconds/{name}": value for name, value in self.seconds.items()}
