"""Processes and counts: whether the run is well, and whether every task is accounted for."""

from __future__ import annotations

import time
from typing import Any

from launcher.folder.counts import MEANINGS, balances
from launcher.folder.metrics import Metrics
from launcher.folder.run import Run
from launcher.page.charts import lines, number, over_time, panel, table

SHOWN = ("process/cpu_seconds", "process/memory_mb", "generator/tokens_per_second", "generator/episodes")
SILENT = 60.0  # seconds, much longer than processes pause between two entries
MOST_LETTERS = 50  # reasons of dead letters


def processes_panel(metrics: Metrics, is_live: bool) -> dict[str, Any]:
    """When each process was last heard of, and what it uses."""
    names, now = metrics.processes(), time.time()
    silence = {name: now - metrics.last_time(name) for name in names} if is_live else {}
    rows = [
        [
            name, number(max(0.0, silence[name])) if is_live else None, metrics.last_version(name),
            *(number(value) if (value := metrics.last(figure, name)) is not None else None for figure in SHOWN),
        ]
        for name in names
    ]  # fmt: skip
    columns = ("process", "heard of, s ago", "version", "CPU seconds", "memory, MB", "tokens/s", "episodes")
    memory = over_time(metrics, {name: (name, "process/memory_mb") for name in names})
    missing = "No process has written anything yet."
    charts = [
        table("processes", "Processes", columns, rows, missing),
        lines("memory", "Memory of processes", memory, missing, "MB", "time"),
    ]
    quiet = [name for name in silence if silence[name] > SILENT and "process/memory_mb" in metrics.names(name)]
    words = " ".join(f"{name} has been silent for {silence[name]:,.0f} s." for name in quiet)
    return panel("processes", "Processes", charts, words)


def counts_panel(run: Run) -> dict[str, Any]:
    """Every task by what became of it: counters, whether they balance, the audit of a chaos run, dead letters."""
    counters = run.counters
    audit = [
        [str(check.get("name", "")), f"✗ {check['problem']}" if check.get("problem") else "✓ holds"]
        for check in run.folder.audit()
    ]
    letters = [[count, reason] for reason, count in run.redis.letters.most_common(MOST_LETTERS)]
    dead = counters.get("dead", 0)
    charts = [
        table("balances", "Whether the counts balance", ("equation", "numbers", ""),
              balances(counters, run.state == "finished"), "No counters are known yet."),
        table("counters", "Every task by what became of it", ("counter", "number", "meaning"),
              [[name.replace("_", " "), value, MEANINGS.get(name, "")] for name, value in sorted(counters.items())],
              "No counters are known yet."),
        table("letters", "Dead letters", ("count", "reason"), letters,
              f"{dead:,}: `spo dead {run.folder.path}` shows them." if dead else "None."),
    ]  # fmt: skip
    if audit:
        charts.append(table("audit", "Audit of the journal, by spo chaos", ("check", "result"), audit, ""))
    return panel("counts", "Counts", charts)
