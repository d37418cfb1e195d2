"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How serious a finding is: a process starts despite warnings, and does not start with a problem."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        name: of the check, two words at most.
        line: what the check found; for a warning or a problem also how to fix it.
    """

    name: str
    level: Level
    line: str


def ok(name: str, line: str) -> Finding:
    """Nothing to do."""
    return Finding(name, Level.OK, line)


def warning(name: str, line: str) -> Finding:
    """The process runs, but not as well as it could."""
    return Finding(name, Level.WARNING, line)


def problem(name: str, line: str) -> Finding:
    """The process cannot run."""
    return Finding(name, Level.PROBLEM, line)
