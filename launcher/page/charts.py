"""Builds the charts of the page as plain data: lines, bars and tables in panels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from launcher.folder.metrics import Distribution, Metrics, Series
from launcher.folder.statistics import Curve, finite, smoothed

MOST_POINTS = 600  # of a line; a longer one is drawn by the lowest and the highest value of each piece
MOST_MEANS = 160  # points of a line over time; a longer one is drawn by means, in a band from lowest to highest
MOST_BINS = 60
SMOOTHED = 10  # steps over which a noisy line is averaged
NO_STEP = "The learner has not finished a step yet."
NO_BATCH = "No batch has been closed yet."
Chart = dict[str, Any]
Line = dict[str, Any]


def panel(name: str, title: str, charts: Iterable[Chart], words: str = "", missing: str = "") -> dict[str, Any]:
    """A panel of charts that belong together.

    Args:
        words: what the charts mean for this run.
        missing: for charts without such a text of their own: why the chart is empty, and what would fill it.
    """
    shown = [chart | {"missing": chart["missing"] or missing} for chart in charts]
    return {"name": name, "title": title, "charts": shown, "words": words}


def curve(label: str, curve: Curve, low: Curve | None = None, high: Curve | None = None) -> Line:
    """A line over versions, with a band if both of its ends are given."""
    kept = thin(curve.values)
    drawn: Line = {"label": label, "x": numbers(curve.versions[kept]), "y": numbers(curve.values[kept])}
    if low is not None and high is not None and len(low.values) and len(high.values):
        drawn["low"], drawn["high"] = (numbers(_at(curve.versions[kept], side)) for side in (low, high))
    return drawn


def steps(metrics: Metrics, labels: Mapping[str, str], process: str | None = None) -> list[Line]:
    """One line over versions for each metric; `labels` maps label to metric."""
    return [curve(label, finite(metrics.series(name, process))) for label, name in labels.items()]


def over_time(metrics: Metrics, labels: Mapping[str, tuple[str, str]]) -> list[Line]:
    """One line over the seconds since the run began for each entry; `labels` maps label to (process, metric)."""
    start, _ = metrics.span()
    return [_over_time(label, metrics.timeline(name, process), start) for label, (process, name) in labels.items()]


def noisy(label: str, series: Series) -> list[Line]:
    """A smoothed line, and behind it the values of single steps; only these if there are few steps."""
    single = finite(series)
    if len(single.values) < 3 * SMOOTHED:
        return [curve(label, single)]
    return [curve(label, smoothed(single, SMOOTHED)), curve(f"{label}, each step", single) | {"faint": True}]


def lines(
    name: str, title: str, drawn: Sequence[Line], unit: str = "", x: str = "step", note: str = "", missing: str = ""
) -> Chart:
    """A chart of lines, without those that have no points.

    Args:
        name: the same in all runs, since charts with the same name are drawn together.
        missing: see `panel`.
        unit: `share`, `tokens`, `tokens/s`, `s`, `ms`, `versions`, `MB`, `GB`, `W`, `nats/token` or "".
        x: `step`, `time` (seconds) or `value` (0 to 1).
    """
    some = [one for one in drawn if one["x"]]
    about = {"kind": "lines", "name": name, "title": title, "unit": unit, "x": x, "note": note}
    return {**about, "lines": some, "missing": missing}


def bars(name: str, title: str, histogram: Distribution | None, unit: str = "", scale: float = 1.0) -> Chart:
    """A histogram, in bins of equal width; its edges are divided by `scale`, 100 if they are in percent."""
    made: Chart = {"kind": "bars", "name": name, "title": title, "unit": unit, "missing": "", "bars": []}
    if histogram is not None and histogram.counts.sum() > 0:
        edges, counts = rebinned(histogram)
        made |= {"edges": numbers(edges / scale), "bars": numbers(counts), "version": histogram.version}
    return made


def table(
    name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], missing: str = "", note: str = ""
) -> Chart:
    """A table; cells are texts, numbers or None."""
    return {
        "kind": "table", "name": name, "title": title, "columns": list(columns), "rows": [list(row) for row in rows],
        "missing": missing, "note": note,
    }  # fmt: skip


def thin(values: np.ndarray) -> np.ndarray:
    """Positions of at most `MOST_POINTS` values that show the same line, with all extremes, ascending."""
    n = len(values)
    if n <= MOST_POINTS:
        return np.arange(n)
    pieces = np.array_split(np.arange(n), MOST_POINTS // 2 - 1)
    filled = np.nan_to_num(values, nan=0.0)
    ends = [(piece[np.argmin(filled[piece])], piece[np.argmax(filled[piece])]) for piece in pieces]
    return np.unique([0, *np.array(ends).ravel().tolist(), n - 1])


def rebinned(histogram: Distribution) -> tuple[np.ndarray, np.ndarray]:
    """Edges and counts of at most `MOST_BINS` bins of equal width; the middle of an old bin decides where it goes."""
    edges, counts = histogram.edges, histogram.counts
    filled = np.flatnonzero(counts > 0)
    first, last = edges[filled[0]], edges[filled[-1] + 1]
    widths = np.diff(edges)
    width = max(float(widths[widths > 0].min(initial=last - first)), (last - first) / MOST_BINS)
    bins = max(1, math.ceil((last - first) / width - 1e-9))
    # The content of a wider bin, as between two distant whole numbers, lies at its upper end.
    middles = edges[1:] - np.minimum(widths, width) / 2
    made, new_edges = np.histogram(middles, bins=bins, range=(first, first + bins * width), weights=counts)
    return new_edges, made


def numbers(values: np.ndarray) -> list[float | int | None]:
    """Values for JSON, as `number` rounds them."""
    return [number(value) for value in values.tolist()]


def number(value: float) -> float | int | None:
    """The value with six significant digits; None if it is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")


def newest(metrics: Metrics, name: str, process: str) -> float | int | None:
    """The newest value of a metric, rounded; None if the process does not measure it."""
    value = metrics.last(name, process)
    return None if value is None else number(value)


def _over_time(label: str, series: Series, start: float) -> Line:
    order = np.argsort(series.times, kind="stable")
    times, values = series.times[order] - start, series.values[order]
    if len(values) <= MOST_MEANS:
        return {"label": label, "x": numbers(times), "y": numbers(values)}
    pieces = np.linspace(times[0], times[-1], MOST_MEANS + 1)
    first = np.unique(np.searchsorted(times, pieces[:-1]))
    counts = np.diff([*first, len(times)])
    filled = np.nan_to_num(values, nan=0.0)
    return {
        "label": label,
        "x": numbers(np.add.reduceat(times, first) / counts),
        "y": numbers(np.add.reduceat(filled, first) / counts),
        "low": numbers(np.minimum.reduceat(filled, first)),
        "high": numbers(np.maximum.reduceat(filled, first)),
    }


def _at(versions: np.ndarray, side: Curve) -> np.ndarray:
    """The curve's values at the given versions, NaN if it has none."""
    places = np.searchsorted(side.versions, versions).clip(0, len(side.versions) - 1)
    return np.where(side.versions[places] == versions, side.values[places], np.nan)
