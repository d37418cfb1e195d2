"""Sides that are measured in turns, so that whatever else the machine does is the same for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.options import ROOT
from benchmarks.tables import table


@dataclass(frozen=True)
class Spent:
    """Seconds of a call, and CPU seconds that this process used in it."""

    wall: float
    cpu: float


def spent(call: Callable[[], object]) -> Spent:
    """Time a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


def in_turns(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[Spent]]:
    """What each side spent in each round, after one call of each that warms it up."""
    for call in sides.values():
        call()
    rows = [{name: spent(call) for name, call in sides.items()} for _ in range(rounds)]
    return {name: [row[name] for row in rows] for name in sides}


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of a process and of its children, vLLM's among them."""
    return float(sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True))))


def measured_by(module: str, *arguments: object, checkout: Path | None = None) -> Any:
    """Run a benchmark of this checkout in a process of its own, and read the JSON that it prints last.

    Args:
        checkout: whose modules it imports; None means those of this process.

    Raises:
        SystemExit: it failed, and has printed why.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if checkout is not None:
            (Path(folder) / "benchmarks").symlink_to(ROOT / "benchmarks")
            # With safe paths, Python does not look for modules in the working folder, which may be another checkout.
            environment |= {"PYTHONPATH": f"{folder}{os.pathsep}{checkout}", "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-m", module, *map(str, arguments)]
        done = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def compared(module: str, arguments: Sequence[object], beside: Path | None = None, turns: int = 1) -> str:
    """A table of the medians over the turns, in Markdown: this checkout's, and another's.

    Args:
        module: a benchmark that, with `--json` and the arguments, prints a JSON object whose entries are the rows.
    """
    checkouts = {"this": ROOT} | ({"beside": beside} if beside else {})
    columns: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(turns):
        for name, checkout in checkouts.items():
            columns[name].append(measured_by(module, "--json", *arguments, checkout=checkout))
    rows = [
        [row, *(f"{median(turn[row] for turn in column):,.1f}" for column in columns.values())]
        for row in columns["this"][0]
    ]
    return table(["", *columns], rows)
