"""What the benchmarks print: tables in Markdown, means with their errors, and rows of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join([line(heads), "|---" * len(heads) + "|", *map(line, rows)])


def line(cells: Sequence[str]) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def twice_error(values: Any) -> Any:
    """Twice the standard error of the mean, over the first dimension; NaN for a single value."""
    values = np.asarray(values, float)
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan)[()]
    return 2 * values.std(0, ddof=1) / len(values) ** 0.5


def band(values: Sequence[float | None], digits: int = 3) -> str:
    """The mean ± twice its standard error; a dash if no value is known."""
    numbers = [value for value in values if value is not None]
    return f"{np.mean(numbers):,.{digits}f} ± {twice_error(numbers):,.{digits}f}" if numbers else "–"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; [] if there is no such file."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
