"""Generates the tables of docs/metrics.md from the table of metrics."""

from __future__ import annotations

from collections.abc import Sequence

from common.metrics import BATCH, STEP, TIME, Metric

TITLES = {"By batch": BATCH, "By step": STEP, "By time": TIME}


def tables() -> dict[str, str]:
    """The table of each section of the page, by its title."""
    return {title: _table(rows) for title, rows in TITLES.items()}


def _table(rows: Sequence[Metric]) -> str:
    lines = [f"| `{row.name}` | {row.unit} | {row.meaning} | {row.panel} |" for row in rows]
    return "\n".join(["| metric | unit | meaning | panel of the page |", "|---|---|---|---|", *lines, ""])
