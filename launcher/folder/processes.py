"""The processes of a run as its folder shows them: when each last wrote something, and what."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path

from launcher.folder.metrics import Metrics

PREFIXES = ("process/", "generator/", "weights/", "relay/")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process of a run.

    Attributes:
        time: Unix seconds of its newest entry.
        version: weight version of that.
        values: what it published about itself, by metric.
    """

    name: str
    time: float
    version: int | None
    values: dict[str, float]


def process_states(metrics: Metrics) -> list[ProcessState]:
    """The state of each process that has written metrics: sampler, learner, then the others."""
    states = []
    for process in metrics.processes():
        names = metrics.names(process)
        values = {name: value for name in names if (value := metrics.last(name, process)) is not None}
        own = {name: value for name, value in values.items() if name.startswith(PREFIXES)}
        states.append(ProcessState(process, metrics.last_time(process) or 0.0, metrics.last_version(process), own))
    return states


def is_locked(folder: Path) -> bool:
    """Whether a command of this machine that holds the folder's lock lives. The lock itself is not touched."""
    try:
        holder = json.loads((folder / "lock").read_text(encoding="utf-8"))
        pid, host = holder["pid"], holder["host"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return host == socket.gethostname() and isinstance(pid, int) and Path(f"/proc/{pid}").exists()
