"""Two checkouts measured in turns, so that whatever else the machine does is the same for both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

THIS = Path(__file__).resolve().parents[1]


def compared(script: str, arguments: Sequence[str], beside: Path | None = None, turns: int = 1) -> str:
    """A table of the medians over the turns, in Markdown: this checkout's, and another's.

    Args:
        script: run with the modules of each checkout; with `--json` and the arguments, the last line that it prints is
            a JSON object, whose entries are the rows.
    """
    checkouts = {"this": THIS} | ({"beside": beside.resolve()} if beside else {})
    columns: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(turns):
        for name, checkout in checkouts.items():
            columns[name].append(_measured(script, arguments, checkout))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in columns["this"][0]:
        figures = (f"{median(turn[row] for turn in column):,.1f}" for column in columns.values())
        lines.append(f"| {row} | {' | '.join(figures)} |")
    return "\n".join(lines)


def _measured(script: str, arguments: Sequence[str], checkout: Path) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, script, "--json", *arguments]
    done = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures
