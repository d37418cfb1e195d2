"""How findings are shown: as a table for people, as JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.doctor.finding import Finding, Level
from common.role import Role

STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
ORDER = list(Level)


def report(found: Mapping[Role, Sequence[Finding]], *, as_json: bool = False) -> int:
    """Show what was found for each role; returns the exit code, 2 where there is a problem, else 0.

    What holds for several roles stands there once.
    """
    roles: dict[Finding, list[Role]] = {}
    for role, findings in found.items():
        for finding in findings:
            roles.setdefault(finding, []).append(role)
    counts = {level: sum(finding.level is level for finding in roles) for level in ORDER}
    if as_json:
        rows = [
            {"check": finding.name, "level": finding.level.value, "line": finding.line, "roles": whose}
            for finding, whose in roles.items()
        ]
        sys.stdout.write(json.dumps({"findings": rows, "problems": counts[Level.PROBLEM]}, indent=2) + "\n")
    else:
        _print(roles, len(found), counts)
    return 2 if counts[Level.PROBLEM] else 0


def _print(roles: Mapping[Finding, Sequence[Role]], asked: int, counts: Mapping[Level, int]) -> None:
    console = Console()
    if not console.is_terminal:
        # One line a finding, however long, for logs and grep.
        for finding, whose in roles.items():
            sys.stdout.write("  ".join(_cells(finding, whose, asked)).rstrip() + "\n")
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for finding, whose in roles.items():
            level, *rest = _cells(finding, whose, asked)
            table.add_row(Text(level, STYLES[finding.level]), *map(Text, rest))
        console.print(table)
    told = [
        f"{number} {level}{'' if number == 1 else 's'}" for level, number in counts.items() if level is not Level.OK
    ]
    sys.stdout.write(f"{counts[Level.OK]} ok, {', '.join(told)}\n")


def _cells(finding: Finding, whose: Sequence[Role], asked: int) -> tuple[str, str, str]:
    about = "" if len(whose) == asked else f" ({', '.join(whose)})"
    # A line may quote what others wrote; it stays one line.
    return f"{finding.level.value:7}", finding.name + about, " ".join(finding.line.split())
