"""Prints findings: as a table on a terminal, else a line each, or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.checks.check import Finding, Level
from common.errors import one_line
from common.process import Role

STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def report(findings: Mapping[Role, Sequence[Finding]], *, as_json: bool = False) -> int:
    """Print the findings about each role, the same finding about several roles once.

    Returns:
        The exit code: 2 if there is a problem, else 0.
    """
    roles: dict[Finding, list[Role]] = {}
    for role, of_role in findings.items():
        for finding in of_role:
            roles.setdefault(finding, []).append(role)
    counts = {level: sum(finding.level is level for finding in roles) for level in Level}
    if as_json:
        rows = [
            {"check": finding.name, "level": finding.level.value, "line": finding.line, "roles": about}
            for finding, about in roles.items()
        ]
        sys.stdout.write(json.dumps({"findings": rows, "problems": counts[Level.PROBLEM]}, indent=2) + "\n")
    else:
        _print(roles, len(findings), counts)
    return 2 if counts[Level.PROBLEM] else 0


def _print(roles: Mapping[Finding, Sequence[Role]], total: int, counts: Mapping[Level, int]) -> None:
    console = Console()
    if not console.is_terminal:
        # One line a finding, never wrapped, for logs and grep.
        for finding, about in roles.items():
            sys.stdout.write("  ".join(_cells(finding, about, total)).rstrip() + "\n")
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for finding, about in roles.items():
            level, *rest = _cells(finding, about, total)
            table.add_row(Text(level, STYLES[finding.level]), *map(Text, rest))
        console.print(table)
    warnings, problems = counts[Level.WARNING], counts[Level.PROBLEM]
    sys.stdout.write(
        f"{counts[Level.OK]} ok, {warnings} warning{'s'[: warnings != 1]}, {problems} problem{'s'[: problems != 1]}\n"
    )


def _cells(finding: Finding, about: Sequence[Role], total: int) -> tuple[str, str, str]:
    roles = "" if len(about) == total else f" ({', '.join(about)})"
    # The line may quote an error message with line breaks.
    return f"{finding.level.value:7}", finding.name + roles, one_line(finding.line)
