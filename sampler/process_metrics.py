"""Metrics by time rather than by version: queues, counters, figures that processes publish, the sampler's timeline."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common.log import Timeline
from common.streams.broker import Broker
from common.streams.tasks import CONSUMER_GROUP
from sampler.files.metrics_file import Entry

SHORTEST, LONGEST = 5.0, 30.0  # seconds between two entries of a process
SHARE_OF_AGE = 1 / 500  # of the time since the start: keeps the number of entries of a long run small
MAX_PROCESSES, MAX_VALUES, MAX_NAME = 256, 64, 64
GAP = 0.1  # longest pause, in seconds, between waits that are shown as one
SHORTEST_WAIT = 0.1  # seconds; shorter waits are not shown


class ProcessMetrics:
    """Reads the metrics of all processes from Redis every few seconds, and less often as the run grows older."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._started = time.monotonic()
        self._last = -math.inf

    def is_due(self) -> bool:
        now = time.monotonic()
        return now - self._last >= min(max(SHORTEST, (now - self._started) * SHARE_OF_AGE), LONGEST)

    def entries(self, version: int, evaluation: str, values: dict[str, float]) -> list[Entry]:
        """An entry for each process; that of the sampler also has `values`.

        Args:
            version: newest weights announced, for processes that publish no version.
            evaluation: name of the open evaluation, or "".
        """
        self._last = time.monotonic()
        processes = self._broker.processes()
        roles = Counter(str(status.get("role"))[:MAX_NAME] for status in processes.values())
        sampler = {f"processes/{role}": float(n) for role, n in roles.items() if role != "unknown"}
        sampler |= {f"samples/{name}": float(n) for name, n in self._broker.counters().items()}
        sampler |= self._queues(evaluation) | values
        entries = {"sampler": Entry(version, "sampler", sampler)}
        for name, status in list(processes.items())[:MAX_PROCESSES]:
            figures = published(status)
            if name in entries:
                sampler |= figures
            elif figures:
                loaded = status.get("version", version)
                entries[name] = Entry(loaded if isinstance(loaded, int) else version, name[:MAX_NAME], figures)
        return list(entries.values())

    def _queues(self, evaluation: str) -> dict[str, float]:
        key = self._broker.key
        pipe = self._broker.redis.pipeline(transaction=False)
        for stream in ("tasks", "samples", "batches", "dead", f"tasks:{evaluation}"):
            pipe.xlen(key(stream))
        pipe.hlen(key("outstanding"))
        pipe.xpending(key("tasks"), CONSUMER_GROUP)
        *lengths, pending = pipe.execute(raise_on_error=False)
        tasks, samples, batches, dead, evaluated, outstanding = (n if isinstance(n, int) else 0 for n in lengths)
        leased = int(pending["pending"]) if isinstance(pending, dict) else 0
        return {
            "queue/tasks": float(max(0, tasks - leased)),
            "queue/leased": float(leased),
            "queue/evaluation": float(evaluated),
            "queue/samples": float(samples),
            "queue/batches": float(batches),
            "queue/outstanding": float(outstanding),
            "queue/dead": float(dead),
            "redis/used_mb": self._broker.memory().used / 1e6,
        }


def published(status: dict[str, Any]) -> dict[str, float]:
    """The figures that a process publishes about itself, as far as they are valid."""
    figures = status.get("metrics")
    if not isinstance(figures, dict):
        return {}
    return {
        name: float(value)
        for name, value in list(figures.items())[:MAX_VALUES]
        if isinstance(name, str) and len(name) <= MAX_NAME and isinstance(value, int | float)
    }


class SamplerTimeline(Timeline):
    """The sampler's timeline. A round waits for milliseconds, so successive waits for one process become one slice."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "sampler")
        self._wait = ("", 0.0, 0.0)  # cause, start, end
        self._evaluation = ("", 0.0)  # name, start

    def waited(self, cause: str, seconds: float) -> None:
        """Note that a round has waited until now."""
        now = time.time()
        before, start, end = self._wait
        if before == cause and now - seconds - end < GAP:
            self._wait = (cause, start, now)
            return
        self.flush()
        self._wait = (cause, now - seconds, now)

    def evaluating(self, evaluation: str) -> None:
        """Note which evaluation is open now, "" for none."""
        name, since = self._evaluation
        if name != evaluation:
            if name:
                self.slice(f"evaluation {name}", since, lane="evaluations")
            self._evaluation = (evaluation, time.time())

    def flush(self) -> None:
        """Write the current wait."""
        cause, start, end = self._wait
        if end - start > SHORTEST_WAIT:
            self.slice(f"waits for {cause}", start, end, lane="waiting")
        self._wait = ("", 0.0, 0.0)
