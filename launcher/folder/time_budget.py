"""Where the time of a run goes: the learner's seconds, the generators' waiting, and which side is the bottleneck."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from common import masking
from launcher.folder.metrics import Metrics, Series

RECENT, SHORTEST = 20, 60.0  # fewest steps and seconds from which the bottleneck is determined
WINDOW = 20  # newest steps, from which the pace is estimated
GAIN = 0.02  # share of a step's time, below which a gain is not worth a move
WAITS = 0.15  # share of its time that a side must wait to count as waiting
MOST_SCORING = 0.5  # share of the running episodes that wait for scores, from which teachers are the bottleneck
# Parts of a learner's step, in order.
LEARNER = {
    "wait": "waiting for a batch",
    "payload": "fetching tokens",
    "old": "log-probs of the policy before the step",
    "train": "training",
    "drift": "measuring drift",
    "publish": "publishing weights",
    "checkpoint": "writing checkpoints",
}


def duration(seconds: float) -> str:
    """A duration as text: `40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@dataclass(frozen=True, slots=True)
class GeneratorTime:
    """A generator's running time over all of its starts, in seconds, and shares of it."""

    name: str
    seconds: float
    idle: float  # share without any task
    pauses: float  # share in which weights were loaded


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """Which side the run waited for over its newest steps, without the learner's start."""

    side: str  # `learner`, `generators`, `teachers`, `both` (learner and generators wait for each other) or `neither`
    steps: int  # number of the steps
    wait: float  # share of its time that the learner waited for a batch
    idle: float  # share of their time that the generators were without any task
    words: str  # a sentence for people
    scoring: float = 0.0  # share of the episodes under way that waited for a teacher's scores
    seconds: float = 0.0  # mean time of a step


@dataclass(frozen=True, slots=True)
class Split:
    """The numbers of GPUs of a run."""

    learner: int
    generators: int
    unit: int = 1  # GPUs that move together: those of a generator, or of ranks that divide sequences


def learner_seconds(metrics: Metrics, after: float = -math.inf, last: float = math.inf) -> dict[str, float]:
    """Seconds of the learner by activity, over the versions later than `after` up to `last`."""
    own = {name.removeprefix("seconds/") for name in metrics.names("learner") if name.startswith("seconds/")}
    names = [*(name for name in LEARNER if name in own), *sorted(own - LEARNER.keys())]
    seconds: dict[str, float] = {}
    for name in names:
        versions, _, values = metrics.series(f"seconds/{name}", "learner")
        seconds[LEARNER.get(name, name)] = float(np.nansum(values[(versions > after) & (versions <= last)]))
    return {name: value for name, value in seconds.items() if value > 0}


def generator_times(metrics: Metrics, begin: float = -math.inf, end: float = math.inf) -> list[GeneratorTime]:
    """The time of each generator between two Unix times; by default all of it."""
    times = []
    for name in _generators(metrics):
        seconds, waits, pauses = (
            accumulated(metrics.timeline(f"generator/{counter}", name), begin, end)
            for counter in ("seconds", "waiting_for_tasks_seconds", "pause_seconds")
        )
        if seconds:
            times.append(GeneratorTime(name, seconds, waits / seconds, pauses / seconds))
    return times


def bottleneck(metrics: Metrics) -> Bottleneck | None:
    """Which side the run waited for over its newest steps; None before two steps of both sides were measured.

    Both sides are compared over the same time, from the end of one step to the end of the newest: `RECENT` steps, or
    more of them if these took less than `SHORTEST` seconds, since generators are measured every few seconds. The first
    step of the learner's newest start is left out, because it waits for engines and for the evaluation before training;
    so is what generators do after the last step.
    """
    steps = newest_steps(metrics)
    if steps is None:
        return None
    (after, last), (begin, end), count = steps.versions[[0, -1]], steps.times[[0, -1]], len(steps.times) - 1
    learner, generators = learner_seconds(metrics, after, last), generator_times(metrics, begin, end)
    if not learner or not generators:
        return None
    wait = learner.get(LEARNER["wait"], 0.0) / sum(learner.values())
    idle = sum(one.idle * one.seconds for one in generators) / sum(one.seconds for one in generators)
    facts = (
        f"over the last {count} steps the learner waited {wait:.0%} of its time for a batch, and the "
        f"generators {idle:.0%} of theirs for tasks"
    )
    most = max(learner, key=lambda name: learner[name])
    scoring = _scoring(metrics, begin, end)
    if wait >= WAITS and scoring >= MOST_SCORING:
        side = "teachers"
        words = (
            f"The teachers are the bottleneck: {facts}, and {scoring:.0%} of the episodes under way waited for scores. "
            "More engines of the teacher (teacher.engine.data_parallel_size), or a smaller one, would help."
        )
    elif max(wait, idle) < WAITS:
        side, words = "neither", f"Neither side waits for long: {facts}."
    elif min(wait, idle) >= WAITS:
        side = "both"
        words = f"They wait for each other: {facts}. {_about_staleness(metrics)}"
    elif wait > idle:
        side = "generators"
        words = f"The generators are the bottleneck: {facts}. More generators, or more episodes at a time, would help."
    else:
        side = "learner"
        words = (
            f"The learner is the bottleneck: {facts}. Most of its step is {most} "
            f"({learner[most] / sum(learner.values()):.0%}); more generators would not help."
        )
    return Bottleneck(side, count, wait, idle, words, scoring, float(end - begin) / count)


def newest_steps(metrics: Metrics) -> Series | None:
    """The ends of the steps that `bottleneck` judges, and of the one before them; None if there are too few."""
    steps = metrics.series("seconds/train", "learner")
    known = max((metrics.timeline("generator/seconds", name).times[-1] for name in _generators(metrics)), default=0.0)
    ends = np.flatnonzero((steps.times > _newest_start(metrics)) & (steps.times <= known))
    if len(ends) < 3:
        return None
    long_ago = np.searchsorted(steps.times[ends], steps.times[ends[-1]] - SHORTEST, side="right") - 1
    ends = ends[max(0, min(len(ends) - 1 - RECENT, long_ago)) :]
    return Series(steps.versions[ends], steps.times[ends], steps.values[ends])


def moved_gpus(slow: Bottleneck, split: Split) -> str | None:
    """What moving GPUs to the other side would bring, by the measured times; None before `RECENT` steps.

    Each side's work in a step is the time in which it did not wait, and is divided evenly among its GPUs.
    """
    if slow.steps < RECENT:
        return None
    learner, generators = (1 - slow.wait) * slow.seconds, (1 - slow.idle) * slow.seconds
    ways: dict[str, float] = {}
    for way, change in (("generators to learner", split.unit), ("learner to generators", -split.unit)):
        ranks, others = split.learner + change, split.generators - change
        if ranks > 0 and others > 0:
            ways[way] = max(learner * split.learner / ranks, generators * split.generators / others)
    if not ways:
        return None
    best = min(ways, key=lambda way: ways[way])
    gpus = "one GPU" if split.unit == 1 else f"{split.unit} GPUs"
    if ways[best] > (1 - GAIN) * slow.seconds:
        return f"moving {gpus} either way would make no step shorter"
    return f"moving {gpus} from {best} would make a step take {ways[best]:.3g} s instead of {slow.seconds:.3g}"


class Pace:
    """Estimates the remaining time from when the newest versions were seen."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=WINDOW + 1)

    def see(self, version: int, now: float | None = None) -> None:
        """Note that a version was published just now."""
        if not self._seen or version != self._seen[-1][1]:
            self._seen.append((time.monotonic() if now is None else now, version))

    def left(self, steps: int, now: float | None = None) -> float | None:
        """Seconds until the last step at the pace of the newest ones; None before two were seen."""
        # A learner that restarted from its checkpoint publishes versions again.
        while len(self._seen) > 1 and self._seen[0][1] >= self._seen[-1][1]:
            self._seen.popleft()
        if len(self._seen) < 2:
            return None
        (began, first), (newest, version) = self._seen[0], self._seen[-1]
        rest = (newest - began) / (version - first) * (steps - version)
        return max(0.0, rest - ((time.monotonic() if now is None else now) - newest))


def seconds_left(metrics: Metrics, steps: int) -> float | None:
    """Seconds from the newest step to the last, at the pace of the newest ones; None if that is not known."""
    versions, times, _ = metrics.series("seconds/train", "learner")
    pace = Pace()
    for version, at in zip(versions[-WINDOW - 1 :].tolist(), times[-WINDOW - 1 :].tolist(), strict=True):
        pace.see(version, at)
    return None if not len(times) or versions[-1] >= steps else pace.left(steps, float(times[-1]))


def total_seconds(metrics: Metrics, phases: dict[str, float]) -> float:
    """How long a run took: the sum of its phases, or the time from first to last measurement if that is longer."""
    first, last = metrics.span()
    return max(sum(phases.values()), last - first)


def accumulated(series: Series, begin: float = -math.inf, end: float = math.inf) -> float:
    """How much a counter grew between two Unix times, evenly from one of its values to the next.

    If it falls, the process was restarted and counts from 0.
    """
    is_finite = np.isfinite(series.values)
    times, values = series.times[is_finite], series.values[is_finite]
    if not len(values):
        return 0.0
    rises = np.diff(values, prepend=0.0)
    grown = np.cumsum(np.where(rises < 0, values, rises))
    before, after = np.interp((begin, end), times, grown, left=0.0)
    return float(after - before)


def _generators(metrics: Metrics) -> list[str]:
    return [name for name in metrics.processes() if len(metrics.timeline("generator/seconds", name).times)]


def _scoring(metrics: Metrics, begin: float, end: float) -> float:
    """Share of the episodes under way that waited for scores between two Unix times."""
    sums = []
    for slots in ("generator/awaiting_scores", "generator/slots"):
        series = [metrics.timeline(slots, name) for name in _generators(metrics)]
        sums.append(sum(float(one.values[(one.times > begin) & (one.times <= end)].sum()) for one in series))
    return sums[0] / sum(sums) if sum(sums) else 0.0


def _about_staleness(metrics: Metrics) -> str:
    """What more staleness would do: it helps unless the correction already masks too many tokens."""
    shares = metrics.series(masking.METRIC, "learner").values.tolist()
    if masking.recent_warning(shares, "masked"):
        return "Older samples would not help: the correction already masks too many of their tokens."
    return "A larger sampler.max_staleness lets them work at the same time."


def _newest_start(metrics: Metrics) -> float:
    """When the learner was first seen after its newest restart, in Unix seconds; 0 if it was never restarted."""
    _, times, used = metrics.timeline("process/cpu_seconds", "learner")
    falls = np.flatnonzero(np.diff(used) < 0)
    return float(times[falls[-1] + 1]) if len(falls) else 0.0
