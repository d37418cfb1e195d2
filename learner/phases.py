"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from common.timeline import Timeline


class Phases:
    """Seconds spent in each phase of a step, which are noted on a timeline."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._timeline = timeline or Timeline(None, "")
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`."""
        start = time.perf_counter()
        try:
            with self._timeline.span(name, lane="step"):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`seconds/<phase>`."""
        return {f"seconds/{name}": value for name, value in self.seconds.items()}
