"""How far a run is: its state as Redis has it, the pace of its steps, and the wall time of its phases."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from common.messages import Step
from common.streams.batches import StepReader
from common.streams.broker import Broker, Memory

RECENT = 60
WINDOW = 20  # steps that the pace is estimated from


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


@dataclass(slots=True)
class Progress:
    """A view of one run; `refresh` brings it up to date."""

    broker: Broker
    steps: int
    reward_range: tuple[float, float] = (0.0, 1.0)
    pace: Pace = field(default_factory=Pace)
    reader: StepReader = field(init=False)
    step: Step | None = None
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    unreadable_evaluations: int = 0
    processes: dict[str, dict[str, Any]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    memory: Memory = field(default_factory=lambda: Memory(0, 0))
    finished: bool = False
    has_generated: bool = False
    variance_ratio: float | None = None

    def __post_init__(self) -> None:
        self.reader = StepReader(self.broker)

    def refresh(self) -> bool:
        """Read what is new; False, and everything as before, while Redis does not answer."""
        try:
            # What was announced before this process looked comes all at once, and says nothing of the pace.
            first = self.step is None
            for step in self.reader.read(count=1000):
                self.step = step
                if not first:
                    self.pace.see(step.version)
                if "reward/mean" in step.metrics:
                    self.rewards.append(step.metrics["reward/mean"])
            self.evaluations, self.unreadable_evaluations = self.broker.all_evaluations()
            self.processes = self.broker.processes()
            for sampler in self.of_role("sampler"):
                self.variance_ratio = sampler.get("variance_ratio", self.variance_ratio)
            self.counters = self.broker.counters()
            self.memory = self.broker.memory()
            self.finished = self.broker.finished()
            self.has_generated = self.has_generated or self.generating()
        except RedisError:
            return False
        return True

    @property
    def version(self) -> int:
        """Newest weight version announced; 0 before the first."""
        return self.step.version if self.step else 0

    @property
    def trained(self) -> bool:
        return self.version >= self.steps

    @property
    def seconds_left(self) -> float | None:
        """Until the last step, at the pace of the newest ones; None where that is not known."""
        return None if self.trained else self.pace.left(self.steps)

    def metric(self, name: str) -> float | None:
        return self.step.metrics.get(name) if self.step else None

    def of_role(self, role: str) -> list[dict[str, Any]]:
        return [process for process in self.processes.values() if process.get("role") == role]

    def tokens_per_second(self) -> float:
        return sum(float(process.get("tokens_per_second", 0.0)) for process in self.of_role("generator"))

    def generating(self) -> bool:
        return any(process.get("state") == "running" for process in self.of_role("generator"))

    def phase(self) -> str:
        """What the run is doing: engine start, evaluation (before and after training) or training."""
        if not self.has_generated and not self.trained:
            return "engine start"
        return "evaluation" if self.trained or not (self.evaluations or self.version) else "training"


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
