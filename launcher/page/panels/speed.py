"""The panels that show how fast each process is, where its time goes, and which one the run waits for."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from launcher.folder.metrics import Metrics
from launcher.folder.run import Run
from launcher.folder.statistics import Curve, smoothed
from launcher.folder.time_budget import LEARNER, bottleneck, duration, generator_times, learner_seconds
from launcher.page.charts import NO_STEP, SMOOTHED, Chart, curve, lines, newest, number, over_time, panel, steps, table

NO_ANSWER = "No generator has answered a task yet."
# Listed for each process that measures them.
PROCESS_METRICS = ("process/cpu_seconds", "process/memory_mb", "generator/tokens_per_second", "generator/episodes")
SILENT = 60.0  # seconds without an entry, much longer than a living process pauses
QUEUES = {"tasks": "tasks to answer", "leased": "tasks being answered", "samples": "answers to count",
          "batches": "batches to train on", "evaluation": "evaluation's tasks", "dead": "dead letters"}  # fmt: skip


def throughput_panel(metrics: Metrics) -> dict[str, Any]:
    """Charts of tokens per second by process, of the parts of a learner step, and of waiting times."""
    others = [name for name in metrics.processes() if name not in ("sampler", "learner")]

    def of_each(metric: str) -> list[dict[str, Any]]:
        return over_time(metrics, {name: (name, metric) for name in others})

    step = {words: f"seconds/{phase}" for phase, words in LEARNER.items()}
    waits = {"for answers of generators": "waiting/generators_seconds", "for the learner": "waiting/learner_seconds"}
    pauses = [line for name in others for line in steps(metrics, {name: "generator/pause_ms_per_update"}, name)]
    note = f"By the time of the last {SMOOTHED} steps, with their waiting."
    scored = lines("scored", "Episodes that wait for scores", of_each("generator/awaiting_scores"), "", "time")
    charts = [
        lines("tokens", "Tokens sampled by generator", of_each("generator/tokens_per_second"), "tokens/s", "time"),
        *([scored] if scored["lines"] else []),
        lines("trained", "Tokens trained on", [curve("learner", learner_rate(metrics))], "tokens/s", note=note,
              missing=NO_STEP),
        lines("phases", "Parts of a learner step", steps(metrics, step, "learner"), "s", missing=NO_STEP),
        lines("waiting", "Waiting of the sampler between two batches", steps(metrics, waits), "s",
              missing="No batch has been closed yet."),
        lines("idle", "Generators without any task", of_each("generator/waiting_for_tasks_fraction"), "share", "time"),
        lines("weights", "Pauses of generators for new weights", pauses, "ms",
              missing="No generator has loaded new weights yet."),
    ]  # fmt: skip
    slow = bottleneck(metrics)
    return panel("throughput", "Throughput", charts, slow.words if slow else "", NO_ANSWER)


def time_panel(run: Run) -> dict[str, Any]:
    """Tables of where the time went since the run began."""
    generators = [
        [one.name, duration(one.seconds), f"{one.idle:.1%}", f"{one.pauses:.1%}"]
        for one in generator_times(run.metrics)
    ]
    columns = ("process", "time", "waiting for tasks", "loading weights")
    charts = [
        _parts("time-phases", "Phases of the newest start", run.phases(), "The newest start has not ended yet."),
        _parts("time-learner", "Learner", learner_seconds(run.metrics), NO_STEP),
        table("time-generators", "Generators", columns, generators, NO_ANSWER),
    ]
    return panel("time", "Time", charts)


def queues_panel(metrics: Metrics) -> dict[str, Any]:
    queues = over_time(metrics, {words: ("sampler", f"queue/{name}") for name, words in QUEUES.items()})
    memory = over_time(metrics, {"used": ("sampler", "redis/used_mb")})
    charts = [
        lines("queues", "Waiting in each queue", queues, x="time"),
        lines("redis", "Memory of Redis", memory, "MB", "time"),
    ]
    return panel("queues", "Queues", charts, missing="The sampler has measured nothing yet.")


def processes_panel(metrics: Metrics, is_live: bool) -> dict[str, Any]:
    """When each process last wrote metrics, and the resources it uses."""
    names, now = metrics.processes(), time.time()
    silence = {name: now - metrics.last_time(name) for name in names} if is_live else {}
    rows = [
        [
            name, number(max(0.0, silence[name])) if is_live else None, metrics.last_version(name),
            *(newest(metrics, figure, name) for figure in PROCESS_METRICS),
        ]
        for name in names
    ]  # fmt: skip
    columns = ("process", "last entry, s ago", "version", "CPU seconds", "memory, MB", "tokens/s", "episodes")
    memory = over_time(metrics, {name: (name, "process/memory_mb") for name in names})
    charts = [
        table("processes", "Processes", columns, rows),
        lines("memory", "Memory of processes", memory, "MB", "time"),
    ]
    quiet = [name for name in silence if silence[name] > SILENT and "process/memory_mb" in metrics.names(name)]
    words = " ".join(f"{name} has been silent for {silence[name]:,.0f} s." for name in quiet)
    return panel("processes", "Processes", charts, words, "No process has written anything yet.")


def learner_rate(metrics: Metrics) -> Curve:
    """Tokens per second that the learner trained on, averaged over the last steps; waiting counts as time."""
    versions, _, tokens = metrics.series("tokens/total", "learner")
    seconds = np.zeros(len(versions))
    for name in metrics.names("learner"):
        if name.startswith("seconds/"):
            part = metrics.series(name, "learner")
            known = np.isin(part.versions, versions)
            seconds[np.searchsorted(versions, part.versions[known])] += np.nan_to_num(part.values[known])
    known = (seconds > 0) & np.isfinite(tokens)
    at = versions[known].astype(float)
    # Tokens over seconds, since a mean of the single steps' rates would overweight the fastest ones.
    rates = smoothed(Curve(at, tokens[known]), SMOOTHED).values / smoothed(Curve(at, seconds[known]), SMOOTHED).values
    return Curve(at, rates)


def _parts(name: str, title: str, seconds: dict[str, float], missing: str) -> Chart:
    total = sum(seconds.values())
    rows = [[part, duration(value), f"{value / total:.1%}"] for part, value in seconds.items() if value > 0]
    return table(name, title, ("part", "time", "share"), rows, missing)
