"""Pictures of the benchmarks: panels with a grid, and curves in a band."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot

from benchmarks.tables import twice_error


def panels(rows: int, columns: int, width: float, height: float, dpi: int = 120) -> tuple[Any, np.ndarray]:
    """A figure and its axes [rows, columns], each of `width` by `height` inches, with a common vertical axis."""
    size = width * columns, height * rows
    figure, axes = pyplot.subplots(rows, columns, figsize=size, dpi=dpi, sharey=True, squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, axes


def curve(axis: Any, x: Any, heights: Any, colour: str, label: str, *, whole: bool = False, **style: Any) -> Any:
    """Draw the mean of several curves [curves, points] in a band; returns the line.

    Args:
        whole: the band spans all curves instead of twice the standard error.
    """
    heights = np.asarray(heights)
    middle = heights.mean(0)
    error = np.nan_to_num(twice_error(heights))
    low, high = (heights.min(0), heights.max(0)) if whole else (middle - error, middle + error)
    (drawn,) = axis.plot(x, middle, color=colour, label=label, **{"linewidth": 1.4} | style)
    axis.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
    return drawn


def save(figure: Any, target: Path) -> None:
    """Write the picture."""
    figure.tight_layout()
    figure.savefig(target, pil_kwargs={"optimize": True})
    pyplot.close(figure)
