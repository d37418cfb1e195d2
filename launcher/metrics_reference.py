"""Generates the tables of docs/metrics.md from the table of metrics."""

from __future__ import annotations

from common.metrics import BATCH, STEP, TIME

TITLES = {"By batch": BATCH, "By step": STEP, "By time": TIME}
HEAD = "| metric | unit | meaning | panel of the page |\n|---|---|---|---|\n"


def tables() -> dict[str, str]:
    """The table of each section of the page, by its title."""
    return {
        title: HEAD + "".join(f"| `{row.name}` | {row.unit} | {row.meaning} | {row.panel} |\n" for row in rows)
        for title, rows in TITLES.items()
    }
