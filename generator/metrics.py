"""What a generator measures of itself: tokens per second, time waiting by cause, pauses for weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from common.metrics import MetricsWriter

WINDOW = 5.0


class GeneratorMetrics:
    """Counts since the start, and rates over the last seconds."""

    def __init__(self, writer: MetricsWriter | None = None) -> None:
        self._writer = writer
        self._started = time.monotonic()
        self.episodes = self.sampled = self.processed = self.updates = 0
        self.pull_seconds = self.pause_seconds = self.idle_seconds = 0.0
        self._marks: list[tuple[float, int]] = [(self._started, 0)]

    def finished(self, sampled: int, processed: int) -> None:
        """An episode ended, with tokens sampled and tokens in all."""
        self.episodes += 1
        self.sampled += sampled
        self.processed += processed

    def updated(self, *, pulled: float, pause: float) -> None:
        """New weights are loaded: seconds of pulling so far, and of this pause."""
        self.updates += 1
        self.pull_seconds = pulled
        self.pause_seconds += pause

    @contextmanager
    def waiting_for_tasks(self, *, idle: bool) -> Iterator[None]:
        """Time spent without a task; it is lost only while no other task runs."""
        started = time.monotonic()
        yield
        if idle:
            self.idle_seconds += time.monotonic() - started

    def tokens_per_second(self) -> float:
        """Sampled tokens of episodes that ended within the last seconds."""
        now = time.monotonic()
        self._marks = [mark for mark in self._marks if mark[0] > now - WINDOW] or self._marks[-1:]
        at, sampled = self._marks[0]
        self._marks.append((now, self.sampled))
        return (self.sampled - sampled) / max(now - at, 1e-3)

    def status(self) -> dict[str, float]:
        """For the display."""
        return {
            "episodes": self.episodes,
            "tokens": self.sampled,
            "tokens_per_second": self.tokens_per_second(),
            "idle_seconds": self.idle_seconds,
            "pause_seconds": self.pause_seconds,
        }

    def write(self, version: int) -> None:
        """For TensorBoard, at a weight version."""
        if self._writer is not None:
            elapsed = time.monotonic() - self._started
            self._writer.write(
                version,
                {
                    "generator/episodes": self.episodes,
                    "generator/tokens_per_second": self.tokens_per_second(),
                    "generator/waiting_for_tasks_fraction": self.idle_seconds / elapsed,
                    "generator/pause_ms_per_update": 1000 * self.pause_seconds / max(self.updates, 1),
                    "generator/pull_ms_per_update": 1000 * self.pull_seconds / max(self.updates, 1),
                },
            )

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
