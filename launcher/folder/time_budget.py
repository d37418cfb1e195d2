"""Where the time of a run goes: the learner's seconds, the generators' waiting, and which side is the bottleneck."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launcher.folder.metrics import Metrics, Series

RECENT = 20  # newest steps, from which the bottleneck is determined
WAITS = 0.15  # share of its time that a side must wait to count as waiting
# Parts of a learner's step, in order.
LEARNER = {
    "wait": "waiting for a batch",
    "payload": "fetching tokens",
    "old": "log-probs of the policy before the step",
    "reference": "log-probs of the reference policy",
    "train": "training",
    "drift": "measuring drift",
    "publish": "publishing weights",
    "checkpoint": "writing checkpoints",
}


@dataclass(frozen=True, slots=True)
class GeneratorTime:
    """A generator's running time over all of its starts, in seconds, and shares of it.

    Attributes:
        idle: share without any task.
        pauses: share in which weights were loaded.
    """

    name: str
    seconds: float
    idle: float
    pauses: float


def learner_seconds(metrics: Metrics, steps: int | None = None) -> dict[str, float]:
    """Seconds of the learner by activity, over all steps or the last `steps`."""
    own = {name.removeprefix("seconds/") for name in metrics.names("learner") if name.startswith("seconds/")}
    names = [*(name for name in LEARNER if name in own), *sorted(own - LEARNER.keys())]
    newest = metrics.last_version("learner") or 0
    seconds: dict[str, float] = {}
    for name in names:
        versions, _, values = metrics.series(f"seconds/{name}", "learner")
        seconds[LEARNER.get(name, name)] = float(
            np.nansum(values if steps is None else values[versions > newest - steps])
        )
    return {name: value for name, value in seconds.items() if value > 0}


def generator_times(metrics: Metrics, since: float = 0.0) -> list[GeneratorTime]:
    """The time of each generator since a Unix time; by default all of it."""
    times = []
    for name in metrics.processes():
        seconds = accumulated(metrics.timeline("generator/seconds", name), since)
        if seconds:
            waits = accumulated(metrics.timeline("generator/waiting_for_tasks_seconds", name), since)
            pauses = accumulated(metrics.timeline("generator/pause_seconds", name), since)
            times.append(GeneratorTime(name, seconds, waits / seconds, pauses / seconds))
    return times


def bottleneck(metrics: Metrics) -> str:
    """A sentence about which side waited for the other over the last steps; "" if nothing was measured."""
    learner = learner_seconds(metrics, RECENT)
    steps = metrics.series("seconds/train", "learner")
    generators = generator_times(metrics, float(steps.times[-RECENT - 1]) if len(steps.times) > RECENT else 0.0)
    if not learner or not generators:
        return ""
    learner_waits = learner.get(LEARNER["wait"], 0.0) / sum(learner.values())
    idle = sum(generator.idle for generator in generators) / len(generators)
    facts = (
        f"over the last {RECENT} steps the learner waited {learner_waits:.0%} of its time for a batch, and the "
        f"generators {idle:.0%} of theirs for tasks"
    )
    if max(learner_waits, idle) < WAITS:
        return f"Neither side waits for long: {facts}."
    if min(learner_waits, idle) >= WAITS:
        return f"They wait for each other: {facts}. A larger sampler.max_staleness lets them work at the same time."
    if learner_waits > idle:
        return f"The generators are the bottleneck: {facts}. More generators, or more episodes at a time, would help."
    most = max(learner, key=lambda name: learner[name])
    return (
        f"The learner is the bottleneck: {facts}. Most of its step is {most} "
        f"({learner[most] / sum(learner.values()):.0%}); more generators would not help."
    )


def total_seconds(metrics: Metrics, phases: dict[str, float]) -> float:
    """How long a run took: the sum of its phases, or the time from first to last measurement if that is longer."""
    first, last = metrics.span()
    return max(sum(phases.values()), last - first)


def accumulated(series: Series, since: float = 0.0) -> float:
    """How much a counter grew since a Unix time; where it falls, the process was restarted and counts from 0."""
    is_finite = np.isfinite(series.values)
    times, values = series.times[is_finite], series.values[is_finite]
    rises = np.diff(values, prepend=0.0)
    return float(np.where(rises < 0, values, rises)[times > since].sum())
