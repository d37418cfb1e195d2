"""The study's results: one JSON line per job, and their summary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LAST = 2  # evaluations whose mean is the final accuracy


@dataclass(frozen=True, slots=True)
class Job:
    """One training run; `overrides` hold the regime and the variant's own, so they say all that decides it."""

    variant: str
    staleness: int
    seed: int
    overrides: tuple[str, ...]

    @property
    def key(self) -> tuple[int, int, tuple[str, ...]]:
        """Equal for jobs with the same result, whatever their variant is called."""
        return self.staleness, self.seed, self.overrides


def read(path: Path) -> dict[tuple[int, int, tuple[str, ...]], dict[str, Any]]:
    """Results by the key of their job; {} where there is no file yet."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["staleness"], row["seed"], tuple(row["overrides"])): row for row in rows}


def append(path: Path, job: Job, result: dict[str, Any]) -> None:
    """Add a job's result as one line, floats with four digits."""
    row = {"variant": job.variant, "staleness": job.staleness, "seed": job.seed, "overrides": job.overrides}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_short(row | result), separators=(",", ":")) + "\n")


def final_accuracy(row: dict[str, Any]) -> float:
    """Mean of the last two held-out evaluations."""
    return float(np.mean([accuracy for _, accuracy in row["accuracy"][-LAST:]]))


def lowest_late(row: dict[str, Any]) -> float:
    """Lowest held-out accuracy in the second half of the run."""
    curve = row["accuracy"]
    return min(accuracy for version, accuracy in curve if 2 * version >= curve[-1][0])


def table(results: Mapping[tuple[str, int], list[dict[str, Any]]], groups: Mapping[str, Iterable[str]]) -> str:
    """Markdown: final accuracy of each variant at each staleness, mean (lowest–highest seed); "–" without a run.

    The last column is the lowest accuracy any seed had in the second half of its run, at any staleness.

    Args:
        results: results by variant and staleness.
        groups: names of variants under a line each.
    """
    ages = sorted({staleness for _, staleness in results})
    header = ["correction, or loss", *(f"staleness {age}" for age in ages), "lowest late"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for title, names in groups.items():
        there = [name for name in names if any((name, age) in results for age in ages)]
        if there:
            lines.append(f"| **{title}** |{' |' * (len(ages) + 1)}")
        for name in there:
            rows = [results.get((name, age), []) for age in ages]
            lowest = min(lowest_late(row) for runs in rows for row in runs)
            lines.append(f"| `{name}` | {' | '.join(map(_cell, rows))} | {lowest:.2f} |")
    return "\n".join(lines)


def _cell(rows: list[dict[str, Any]]) -> str:
    finals = [final_accuracy(row) for row in rows]
    if not finals:
        return "–"
    spread = f" ({min(finals):.2f}–{max(finals):.2f})" if len(finals) > 1 else ""
    return f"{np.mean(finals):.2f}{spread}"


def _short(value: Any) -> Any:
    """Floats in a tree cut to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return value
