"""Two checkouts measured in turns, so that whatever else the machine does is the same for both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

THIS = Path(__file__).resolve().parents[1]


def compared(benchmark: str, arguments: Sequence[str], beside: Path | None = None, turns: int = 1) -> str:
    """A table of the medians over the turns, in Markdown: this checkout's, and another's.

    Args:
        benchmark: name of the module; with `--json` and the arguments, the last line that it prints is a JSON object,
            whose entries are the rows.
    """
    checkouts = {"this": THIS} | ({"beside": beside} if beside else {})
    columns: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(turns):
        for name, checkout in checkouts.items():
            columns[name].append(measured_with(checkout, benchmark, "--json", *arguments))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in columns["this"][0]:
        figures = (f"{median(turn[row] for turn in column):,.1f}" for column in columns.values())
        lines.append(f"| {row} | {' | '.join(figures)} |")
    return "\n".join(lines)


def measured_with(checkout: Path, benchmark: str, *arguments: str) -> dict[str, float]:
    """Run a benchmark of this checkout with the modules of another one; it prints a JSON object.

    Raises:
        SystemExit: it failed, and has printed why.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "benchmarks").symlink_to(THIS / "benchmarks")
        # Safe: the working folder, whose packages have the same names, comes before neither, in no process started.
        environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{checkout}", "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-m", benchmark, *arguments]
        done = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures
