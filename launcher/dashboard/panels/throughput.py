"""How fast each process is, what it waits for, and so which of them the run waits for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from launcher.dashboard.charts import line, lines, panel
from launcher.folder.metrics import Metrics

RECENT = 20  # steps that the words are about
WAITS = 0.15  # of its time, from which on a process counts as waiting
PHASES = {"wait": "waiting for a batch", "payload": "fetching tokens", "old": "log-probs before", "train": "training",
          "drift": "measuring drift", "publish": "publishing weights", "checkpoint": "checkpoint"}  # fmt: skip


def throughput_panel(metrics: Metrics, start: float) -> dict[str, Any]:
    """Tokens and samples a second by process; seconds of a step by what they went into."""
    generators = [name for name in metrics.processes() if name not in ("sampler", "learner")]
    fractions = [
        line(name, metrics.timeline("generator/waiting_for_tasks_fraction", name), start) for name in generators
    ]
    charts = [
        lines(
            "tokens", "Tokens sampled by generator",
            [line(name, metrics.timeline("generator/tokens_per_second", name), start) for name in generators],
            "No generator has answered anything yet.", "tokens/s", "time",
        ),
        lines(
            "trained", "Tokens trained on",
            [line("learner", metrics.series("tokens/per_second", "learner"))],
            "The learner has made no step yet.", "tokens/s",
        ),
        lines(
            "phases", "A learner step, by what it did",
            [line(words, metrics.series(f"seconds/{phase}", "learner")) for phase, words in PHASES.items()],
            "The learner has made no step yet.", "s",
        ),
        lines(
            "waiting", "Waiting of the sampler, between two batches",
            [
                line("for answers of generators", metrics.series("waiting/generators_seconds")),
                line("for the learner", metrics.series("waiting/learner_seconds")),
            ],
            "No batch has been closed yet.", "s",
        ),
        lines(
            "idle", "Generators without any task", fractions, "No generator has answered anything yet.", "share", "time"
        ),
        lines(
            "weights", "Pauses of generators for new weights",
            [line(name, metrics.series("generator/pause_ms_per_update", name)) for name in generators],
            "No generator has loaded new weights yet.", "ms",
        ),
    ]  # fmt: skip
    return panel("throughput", "Throughput", charts, bottleneck(metrics))


def bottleneck(metrics: Metrics) -> str:
    """Which processes the others wait for, over the last steps; "" where that is not known."""
    seconds = {
        phase: float(np.nansum(values))
        for phase in PHASES
        if len(values := metrics.series(f"seconds/{phase}", "learner").values[-RECENT:])
    }
    total = sum(seconds.values())
    idle = [
        value
        for name in metrics.processes()
        if (value := metrics.last("generator/waiting_for_tasks_fraction", name)) is not None and math.isfinite(value)
    ]
    if not total or not idle:
        return ""
    learner_waits, generators_wait = seconds.get("wait", 0.0) / total, sum(idle) / len(idle)
    facts = (
        f"over the last {RECENT} steps the learner waited {learner_waits:.0%} of its time for a batch, and generators "
        f"are without any task {generators_wait:.0%} of theirs"
    )
    if max(learner_waits, generators_wait) < WAITS:
        return f"Nothing waits for long: {facts}."
    if learner_waits >= generators_wait:
        return f"The generators are the bottleneck: {facts}. More of them, or shorter answers, would speed the run up."
    most = max((phase for phase in seconds if phase != "wait"), key=lambda phase: seconds[phase], default="train")
    return (
        f"The learner is the bottleneck: {facts}. Most of its step is {PHASES[most]} "
        f"({seconds[most] / total:.0%}); more generators would not help."
    )
