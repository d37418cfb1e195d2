"""A generator's own metrics: tokens per second, waits by cause, pauses for weights, and what its engine counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from common.log import Timeline
from generator.engine.counts import EngineCounts

WINDOW = 5.0  # seconds over which rates are computed
SHORTEST_SLICE = 0.05  # seconds; the timeline shows no shorter wait for tasks


class GeneratorMetrics:
    """Episodes, and the time spent on new weights: counts since the start, and rates over the last `WINDOW`.

    Args:
        engine: the engine's counts, which it continues to increase.
        gpus: number of GPUs of the engine.
    """

    def __init__(self, timeline: Timeline, engine: EngineCounts, gpus: int) -> None:
        self.timeline, self._engine, self._gpus = timeline, engine, gpus
        self.updates = 0
        self.pull_seconds = self.pause_seconds = 0.0
        self._started = time.monotonic()
        self.episodes = self.sampled = self.failed = 0
        self.idle_seconds = 0.0
        self._idle_since: float | None = None
        # When, tokens, idle seconds, and the engine's counts.
        self._marks: list[tuple[float, int, float, EngineCounts]] = [(self._started, 0, 0.0, EngineCounts())]

    def finished(self, sampled: int) -> None:
        """Count an episode and its model tokens."""
        self.episodes += 1
        self.sampled += sampled

    @contextmanager
    def waiting_for_tasks(self, *, idle: bool) -> Iterator[None]:
        """Measure a wait for tasks; its time counts only if no other task runs (`idle`)."""
        self._idle_since = time.monotonic() if idle else None
        try:
            yield
        finally:
            now, since = time.monotonic(), self._idle_since
            self.idle_seconds, self._idle_since = self.idle(now), None
            if since is not None and now - since > SHORTEST_SLICE:
                self.timeline.slice("no task", time.time() - (now - since), lane="waiting")

    def idle(self, now: float) -> float:
        """Seconds without any task, including a wait that has not ended."""
        return self.idle_seconds + (0.0 if self._idle_since is None else now - self._idle_since)

    def updated(self, *, pulled: float, pause: float) -> None:
        """Count loaded weights: seconds of all pulls so far, and of this pause."""
        self.updates += 1
        self.pull_seconds = pulled
        self.pause_seconds += pause

    def status(self, slots: int, concurrency: int, awaiting_weights: int, awaiting_scores: int) -> dict[str, Any]:
        """Return the status to display, with `metrics` for `metrics.jsonl`; seconds and counts are since the start.

        Args:
            slots: tasks being answered now.
            concurrency: how many there may be.
            awaiting_weights: how many of `slots` wait for newer weights.
            awaiting_scores: further tasks, whose episodes wait for their teacher's scores.
        """
        now, updates = time.monotonic(), max(self.updates, 1)
        idle = self.idle(now)
        self._marks = [mark for mark in self._marks if mark[0] > now - WINDOW] or self._marks[-1:]
        then, sampled, idle_before, engine_before = self._marks[0]
        self._marks.append((now, self.sampled, idle, replace(self._engine)))
        seconds = max(now - then, 1e-3)
        rate = (self.sampled - sampled) / seconds
        metrics = {
            "generator/episodes": self.episodes,
            "generator/failed": self.failed,
            "generator/tokens": self.sampled,
            "generator/tokens_per_second": rate,
            "generator/slots": slots,
            "generator/slots_awaiting_weights": awaiting_weights,
            "generator/awaiting_scores": awaiting_scores,
            "generator/concurrency": concurrency,
            "generator/seconds": now - self._started,
            "generator/waiting_for_tasks_seconds": idle,
            "generator/waiting_for_tasks_fraction": (idle - idle_before) / seconds,
            "generator/pause_seconds": self.pause_seconds,
            "generator/pull_seconds": self.pull_seconds,
            "generator/updates": self.updates,
            "generator/pause_ms_per_update": 1000 * self.pause_seconds / updates,
            "generator/pull_ms_per_update": 1000 * self.pull_seconds / updates,
            **self._engine.since(engine_before),
            **({"generator/tokens_per_second_per_gpu": rate / self._gpus} if self._gpus else {}),
        }
        return {
            "episodes": self.episodes,
            "tokens_per_second": rate,
            "playing": slots,
            "scoring": awaiting_scores,
            "concurrency": concurrency,
            "metrics": metrics,
        }
