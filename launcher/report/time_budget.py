"""Where the time of a run went: phases, the learner's seconds, the generators' waiting, and who was the bottleneck."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launcher.folder.metrics import Metrics
from launcher.folder.series import Series
from launcher.report.run_data import RunData

WAITS = 0.15  # share of its time from which a process counts as held up
# Parts of a learner's step, in order, and what they are.
LEARNER = {
    "wait": "waiting for a batch",
    "payload": "fetching payloads",
    "old": "log-probs of the policy before the step",
    "reference": "log-probs of the reference policy",
    "train": "training",
    "drift": "measuring the drift",
    "publish": "publishing weights",
    "checkpoint": "writing checkpoints",
}


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds that were spent on something, and their share of all."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class GeneratorTime:
    """A generator's time: shares of the seconds since its start; None where its metrics do not say.

    Attributes:
        seconds: since it began; all of its starts together.
        tasks: without a task to work on.
        pauses: while weights were loaded.
    """

    name: str
    seconds: float
    tasks: float | None
    pauses: float | None


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """Where the time went.

    Attributes:
        total: seconds from the first to the last measurement.
        phases: of the newest start, as the launcher saw them.
        bottleneck: in words.
    """

    total: float
    phases: list[Part]
    learner: list[Part]
    generators: list[GeneratorTime]
    bottleneck: str


def time_budget(run: RunData) -> TimeBudget:
    """Where the time of a run went; what its metrics do not say is empty."""
    metrics = run.metrics
    phases = run.summary.get("seconds")
    seconds = {str(name): float(value) for name, value in phases.items()} if isinstance(phases, dict) else {}
    learner = _parts(_learner(metrics))
    generators = [_generator(metrics, name) for name in metrics.processes() if _is_generator(metrics, name)]
    measured = np.concatenate([_times(metrics, "sampler"), _times(metrics, "learner")])
    spanned = float(measured.max() - measured.min()) if len(measured) else 0.0
    return TimeBudget(
        total=max(sum(seconds.values()), spanned),
        phases=_parts(seconds),
        learner=learner,
        generators=generators,
        bottleneck=bottleneck(learner, generators),
    )


def bottleneck(learner: list[Part], generators: list[GeneratorTime]) -> str:
    """Which side held the other up, in words."""
    waits = next((part.share for part in learner if part.name == LEARNER["wait"]), None)
    shares = [generator.tasks for generator in generators if generator.tasks is not None]
    idle = float(np.mean(shares)) if shares else None
    if waits is None or idle is None:
        return "Not known: the metrics of learner or generators are missing."
    both = f"The learner waited {waits:.0%} of its time for batches, the generators {idle:.0%} of theirs for tasks. "
    if waits < WAITS and idle < WAITS:
        return both + "No side held the other up."
    if min(waits, idle) >= WAITS:
        return both + "They waited for each other: a larger sampler.max_staleness lets them work at the same time."
    if waits > idle:
        return both + "The generators were the bottleneck: more of them, or more episodes at a time, make it faster."
    return both + "The learner was the bottleneck: a faster one makes it faster, and fewer generators would do."


def accumulated(series: Series) -> float:
    """What a process has counted since its start, in all its starts: a count that falls has begun anew."""
    values = series.values[np.isfinite(series.values)]
    if not len(values):
        return 0.0
    ends = np.flatnonzero(np.diff(values) < 0)
    return float(values[ends].sum() + values[-1])


def _learner(metrics: Metrics) -> dict[str, float]:
    names = [name for name in metrics.names("learner") if name.startswith("seconds/")]
    sums = {name.removeprefix("seconds/"): float(np.nansum(metrics.series(name, "learner").values)) for name in names}
    known = {text: sums.pop(name) for name, text in LEARNER.items() if name in sums}
    return known | sums


def _is_generator(metrics: Metrics, process: str) -> bool:
    return any(name.startswith("generator/") for name in metrics.names(process))


def _generator(metrics: Metrics, name: str) -> GeneratorTime:
    seconds = accumulated(metrics.timeline("generator/seconds", name))
    if not seconds:
        # Of an earlier release, whose share is that since the start.
        times = metrics.timeline("generator/tokens_per_second", name).times
        idle = metrics.last("generator/waiting_for_tasks_fraction", name)
        return GeneratorTime(name, float(times[-1] - times[0]) if len(times) else 0.0, idle, None)
    waits = accumulated(metrics.timeline("generator/waiting_for_tasks_seconds", name))
    pauses = accumulated(metrics.timeline("generator/pause_seconds", name))
    return GeneratorTime(name, seconds, waits / seconds, pauses / seconds)


def _parts(seconds: dict[str, float]) -> list[Part]:
    total = sum(seconds.values())
    return [Part(name, value, value / total) for name, value in seconds.items() if value > 0 and total > 0]


def _times(metrics: Metrics, process: str) -> np.ndarray:
    """When a process wrote its metrics."""
    return np.concatenate([np.empty(0), *(metrics.timeline(name, process).times for name in metrics.names(process))])
