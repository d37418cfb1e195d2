"""The progress of a run: its state in Redis, the pace of its steps, and the wall time of its phases."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from common.config import Config
from common.masking import METRIC, MOST, advice, recent_warning
from common.messages import Step
from common.streams.broker import Broker, Memory
from common.streams.early_stop import EarlyStop
from common.streams.steps import StepReader
from launcher.folder.gpu_health import Problem, problems
from launcher.folder.metrics import Metrics
from launcher.folder.time_budget import Bottleneck, Pace, Split, bottleneck

RECENT = 60  # newest rewards that are shown
MEASURED = 2048  # newest values of each metric: at least some hours of a run


@dataclass(slots=True)
class Progress:
    """The state of one run; `refresh` brings it up to date."""

    broker: Broker
    steps: int  # the last version of the run: `run.steps`, or an earlier one that `run.stop_when` led to
    reward_range: tuple[float, float] = (0.0, 1.0)
    folder: Path | None = None  # it may be on another machine, and then there are no metrics
    has_teacher: bool = False
    evaluates_first: bool = True  # whether the version that training starts from is evaluated
    masked_advice: str = ""  # what masks tokens, and what to try against it
    pace: Pace = field(default_factory=Pace)
    reader: StepReader = field(init=False)
    step: Step | None = None
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    masked: dict[int, float] = field(default_factory=dict)  # share of the tokens that were masked, by version
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    unreadable_evaluations: int = 0
    processes: dict[str, dict[str, Any]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    memory: Memory = field(default_factory=lambda: Memory(0, 0))
    finished: bool = False
    has_generated: bool = False
    variance_ratio: float | None = None
    # By version, the samples that could not be trained on, and all samples of the batch.
    left_out: dict[int, tuple[int, int]] = field(default_factory=dict)
    teacher_gpus: Callable[[], dict[str, float]] = dict  # of teachers' servers that were started here
    split: Split | None = None  # how many GPUs each side has here; None if that is not known, or they share one
    on_step: Callable[[Step], object] = lambda _: None
    stop_when: int | None = None
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    metrics: Metrics | None = field(init=False)

    @classmethod
    def of(cls, broker: Broker, config: Config) -> Progress:
        evaluates_first = config.data.heldout is not None and config.eval.before_training
        ends, has_teacher = config.sampler.tracker.reward_range, bool(config.teachers_in_use())
        return cls(
            broker, config.run.steps, ends, config.run.folder, has_teacher, evaluates_first, advice(config),
            stop_when=config.run.stop_when,
        )  # fmt: skip

    def __post_init__(self) -> None:
        self.reader = StepReader(self.broker)
        self.metrics = None if self.folder is None else Metrics(self.folder, MEASURED)

    def refresh(self) -> bool:
        """Read the newest figures from Redis; returns False if it does not answer, and keeps the figures so far."""
        if self.metrics is not None:
            self.metrics.update()
        try:
            # Steps from before this process started come all at once, and say nothing about the pace.
            first = self.step is None
            for step in self.reader.read(count=1000):
                self.step = step
                self.on_step(step)
                if not first:
                    self.pace.see(step.version)
                if "batch/left_out" in step.metrics:
                    left_out, samples = (int(step.metrics[name]) for name in ("batch/left_out", "batch/samples"))
                    self.left_out[step.version] = (left_out, samples)
                if "reward/mean" in step.metrics:
                    self.rewards.append(step.metrics["reward/mean"])
                if METRIC in step.metrics:
                    self.masked[step.version] = step.metrics[METRIC]
            self.early_stop = EarlyStop.of(self.broker)
            self.steps = self.early_stop.last_version(self.steps, self.stop_when)
            self.evaluations, self.unreadable_evaluations = self.broker.all_evaluations()
            self.processes = self.broker.processes()
            for sampler in self.of_role("sampler"):
                self.variance_ratio = sampler.get("variance_ratio", self.variance_ratio)
            self.counters = self.broker.counters()
            self.memory = self.broker.memory()
            self.finished = self.broker.finished()
            self.has_generated |= any(one.get("state") == "running" for one in self.of_role("generator"))
        except RedisError:
            return False
        return True

    @property
    def version(self) -> int:
        """The newest published weight version; 0 before the first."""
        return self.step.version if self.step else 0

    @property
    def samples_left_out(self) -> tuple[int, int]:
        """How many samples could not be trained on, as their tokens were gone or unusable; and all samples."""
        return sum(lost for lost, _ in self.left_out.values()), sum(whole for _, whole in self.left_out.values())

    @property
    def ends_early(self) -> str | None:
        """Why the run ends before `run.steps`; None if it does not."""
        return str(self.early_stop) if self.early_stop.holds(self.stop_when) else None

    @property
    def trained(self) -> bool:
        return self.version >= self.steps

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step, at the pace of the newest ones; None if that is not known."""
        return None if self.trained else self.pace.left(self.steps)

    @property
    def bottleneck(self) -> Bottleneck | None:
        """Which side the newest steps waited for; None if that is not known."""
        return None if self.metrics is None else bottleneck(self.metrics)

    @property
    def gpu_problems(self) -> list[Problem]:
        """What wastes GPUs over the newest steps."""
        return [] if self.metrics is None else problems(self.metrics)

    @property
    def masked_warning(self) -> str | None:
        """A sentence if too many tokens are masked, over all steps or over the newest; else None."""
        share = self.masked_share
        if share is not None and share > MOST:
            return f"{share:.0%} of the tokens of all steps are {self.masked_advice}"
        return recent_warning([*self.masked.values()], self.masked_advice)

    @property
    def masked_share(self) -> float | None:
        """Mean share of the tokens that were masked, over all steps; None before the first."""
        return sum(self.masked.values()) / len(self.masked) if self.masked else None

    def metric(self, name: str) -> float | None:
        return self.step.metrics.get(name) if self.step else None

    def of_role(self, role: str) -> list[dict[str, Any]]:
        return [process for process in self.processes.values() if process.get("role") == role]

    def measured(self, role: str) -> list[dict[str, float]]:
        """The newest metrics of each process of a role."""
        return [process.get("metrics", {}) for process in self.of_role(role)]

    def tokens_per_second(self) -> float:
        return sum(float(process.get("tokens_per_second", 0.0)) for process in self.of_role("generator"))

    @property
    def scoring(self) -> int | None:
        """The number of episodes that wait for their teacher's scores; None without a teacher."""
        waiting = sum(int(process.get("scoring", 0)) for process in self.of_role("generator"))
        return waiting if self.has_teacher else None

    @property
    def evaluated(self) -> str | None:
        """How many answers the open evaluation has, such as `3/9`; None if no evaluation is open."""
        return next((process["evaluating"] for process in self.of_role("sampler") if process.get("evaluating")), None)

    def phase(self) -> str:
        """The run's phase: engine start, evaluation (before and after training) or training."""
        if not self.has_generated and not self.trained:
            return "engine start"
        is_before = self.evaluates_first and not (self.evaluations or self.version)
        return "evaluation" if self.trained or is_before else "training"


@dataclass(slots=True)
class PhaseTimer:
    """Measures the wall time of phases, one at a time; a phase that is entered again adds to its time."""

    seconds: dict[str, float] = field(default_factory=dict)
    current: str | None = None
    _since: float = 0.0

    def enter(self, name: str | None) -> None:
        """Count the time from now on for phase `name`, or for no phase if it is None."""
        now = time.monotonic()
        if self.current is not None:
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + now - self._since
        self.current, self._since = name, now

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Count the time of the block for phase `name`, then return to the current phase."""
        before = self.current
        self.enter(name)
        yield
        self.enter(before)

    def total(self) -> float:
        """Seconds in all phases so far, the current one included."""
        running = time.monotonic() - self._since if self.current is not None else 0.0
        return sum(self.seconds.values()) + running
