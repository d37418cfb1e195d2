"""The figures of an evaluation for people to read: of `spo eval`, `spo status` and the closing table of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.box import HEAVY_HEAD
from rich.table import Table
from rich.text import Text

from common.errors import one_line


def evaluation_table(figures: Mapping[str, float], title: str | None = None) -> Table:
    """One row for each data set and each value of `eval.by_column`, and one for all; one column for each figure.

    Args:
        figures: by name, as `sampler.evaluation_metrics.summarize_groups` makes them.
        title: without one, the table has no lines: it stands within another.
    """
    columns = [name for name in figures if "/" not in name and (name != "set_aside" or figures[name])]
    groups = list(dict.fromkeys(name.rpartition("/")[0] for name in figures if "/" in name))
    table = Table(title=title, box=HEAVY_HEAD if title else None)
    table.add_column("data", style="bold")
    for name in columns:
        table.add_column(Text(one_line(name.replace("_", " "))), justify="right")
    for group in [*groups, ""]:
        values = [figures.get(f"{group}/{name}" if group else name, math.nan) for name in columns]
        cells = (_cell(name, value) for name, value in zip(columns, values, strict=True))
        table.add_row(Text(one_line(group) or "all"), *cells)
    return table


def _cell(name: str, value: float) -> str:
    if math.isnan(value):
        return "–"
    if name in ("samples", "set_aside"):
        return f"{value:,.0f}"
    return f"{value:.3f}" if name == "reward" else f"{value:.1%}"
