"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is: a process runs with warnings, and does not with a problem."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Attributes:
        name: of the check, two words at most.
        line: what was found; of a warning or a problem with its remedy.
    """

    name: str
    level: Level
    line: str


def ok(name: str, line: str) -> Finding:
    """All is well."""
    return Finding(name, Level.OK, line)


def warning(name: str, line: str) -> Finding:
    """It runs, and worse than it could."""
    return Finding(name, Level.WARNING, line)


def problem(name: str, line: str) -> Finding:
    """It does not run."""
    return Finding(name, Level.PROBLEM, line)
