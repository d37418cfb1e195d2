"""Queues, processes, books: whether the run is well."""

from __future__ import annotations

from typing import Any

from launcher.dashboard.charts import line, lines, number, panel, table
from launcher.folder.metrics import Metrics
from launcher.folder.processes import process_states

QUEUES = {"tasks": "tasks to answer", "leased": "tasks being answered", "samples": "answers to count",
          "batches": "batches to train on", "evaluation": "evaluation's tasks", "dead": "dead letters"}  # fmt: skip
OLDER = "Runs of earlier releases do not write this: `metrics.jsonl` has it."
SHOWN = ("process/cpu_seconds", "process/memory_mb", "generator/tokens_per_second", "generator/episodes")


def queues_panel(metrics: Metrics, start: float) -> dict[str, Any]:
    """How much waits in each queue."""
    queues = [line(words, metrics.timeline(f"queue/{name}", "sampler"), start) for name, words in QUEUES.items()]
    memory = line("used", metrics.timeline("redis/used_mb", "sampler"), start)
    charts = [
        lines("queues", "Waiting in each queue", queues, OLDER, "", "time"),
        lines("redis", "Memory of Redis", [memory], OLDER, "MB", "time"),
    ]
    return panel("queues", "Queues", charts)


def processes_panel(metrics: Metrics, books: dict[str, int], start: float, now: float | None) -> dict[str, Any]:
    """When each process was last heard of, what it uses, and the run's counters.

    Args:
        now: Unix seconds, of a run that goes on; None: it is over.
    """
    states = process_states(metrics)
    newest = max((state.time for state in states), default=0.0) if now is None else now
    rows = [
        [
            state.name, None if now is None else number(max(0.0, newest - state.time)), state.version,
            *(number(value) if (value := state.values.get(name)) is not None else None for name in SHOWN),
        ]
        for state in states
    ]  # fmt: skip
    columns = ("process", "heard of, s ago", "version", "CPU seconds", "memory, MB", "tokens/s", "episodes")
    memory = [line(state.name, metrics.timeline("process/memory_mb", state.name), start) for state in states]
    counters = [[name.replace("_", " "), count] for name, count in sorted(books.items())]
    charts = [
        table("processes", "Processes", columns, rows, "No process has written anything yet."),
        lines("memory", "Memory of processes", memory, OLDER, "MB", "time"),
        table("books", "Books: every task by what became of it", ("counter", "number"), counters,
              "No batch has been closed yet.", note=_balance(books)),
    ]  # fmt: skip
    return panel("processes", "Processes and books", charts, _silent(metrics, now))


def _balance(books: dict[str, int]) -> str:
    if "dispatched" not in books or "counted" not in books:
        return ""
    dispatched, counted = books["dispatched"], books["counted"]
    if dispatched == counted:
        return f"{dispatched:,} dispatched, {counted:,} counted: each once"
    return f"{dispatched:,} dispatched, {counted:,} counted, {max(0, dispatched - counted):,} on their way"


def _silent(metrics: Metrics, now: float | None) -> str:
    """Processes that have been silent much longer than they write."""
    if now is None:
        return ""
    silent = [
        state for state in process_states(metrics) if "process/memory_mb" in state.values and now - state.time > 60.0
    ]
    return " ".join(f"{state.name} has been silent for {now - state.time:,.0f} s." for state in silent)
