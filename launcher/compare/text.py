"""The figures of a comparison as text, on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable

from launcher.compare.figures import LineFigures
from launcher.report.statistics import Band
from launcher.run.pace import duration


def cells(line: LineFigures) -> list[str]:
    """The figures of a line as text, in the order of `Comparison.columns`."""
    reached = f" ({line.reached} of {line.runs})" if 0 < line.reached < line.runs else ""
    return [
        _band(line.before, _percent),
        _band(line.after, _percent),
        _band(line.reward, lambda value: f"{value:.2f}"),
        _band(line.samples, lambda value: f"{value:,.0f}") + reached,
        _band(line.seconds, duration),
        _band(line.tokens_per_second, lambda value: f"{value:,.0f}"),
    ]


def _percent(value: float) -> str:
    return f"{value:.1%}"


def title(line: LineFigures) -> str:
    """What a line is called, with the number of its runs."""
    return line.label if line.runs == 1 else f"{line.label} ({line.runs} runs)"


def _band(band: Band | None, text: Callable[[float], str]) -> str:
    """A mean and, where they differ from it, its ends."""
    if band is None:
        return "–"
    mean, low, high = map(text, band)
    if low == high:
        return mean
    # The unit once, where both ends have the same.
    number, _, unit = low.removesuffix("%").rpartition(" ")
    is_short = number.isdecimal() and high.endswith(f" {unit}") and high.count(" ") == 1
    return f"{mean} ({number if is_short else low.removesuffix('%')}–{high})"
