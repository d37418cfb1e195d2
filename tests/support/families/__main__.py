"""`python -m tests.support.families [FAMILY ...] [--write docs/models.md]`: measures families and tabulates them.

Each family is measured in a process of its own, so that one that crashes ends no other. Figures are kept in
`tests/golden/families.json`; families that are not named keep theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.support.families import FAMILIES
from tests.support.families.table import FIGURES, PARTS, agrees, fill
from tests.support.forked import forked_module

SECONDS = 600  # for one family


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.families", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="by default all")
    parser.add_argument("--write", type=Path, metavar="FILE", help="fill the tables in there")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.families if name not in FAMILIES]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for name in arguments.families or FAMILIES:
        figures[name] = measured(name)
        print(f"{name}: {'agrees' if agrees(name, figures[name]) else 'differs'} {figures[name]}", flush=True)
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    if arguments.write:
        arguments.write.write_text(fill(arguments.write.read_text(), figures))


def measured(family: str) -> dict[str, Any]:
    """Each of `PARTS`: differences of log-probs, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        process = forked_module("tests.support.families.measure", [family], environment=os.environ, log=log)
        try:
            end = f"the process ended with {process.wait(SECONDS)}"
        finally:
            process.kill()
        printed = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    parts: dict[str, Any] = dict.fromkeys(PARTS, end)
    for part in printed:
        parts |= part
    if isinstance(start := parts.pop("start", []), str):
        parts["engine"] = parts["merged"] = start
    return parts


if __name__ == "__main__":
    main()
