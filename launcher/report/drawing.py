"""Draws charts with matplotlib: as SVG for a page that is light or dark, or as PNG."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError, one_line
from launcher.report.curves import Chart, Line

# Light and dark of the same hue, in the order in which lines take them (Okabe and Ito's palette, which the colour-blind
# can tell apart, and lighter ones for dark pages).
PALETTE = (
    ("#0b6bab", "#5ab4f0"),
    ("#c4570c", "#f59a4a"),
    ("#0a7f5c", "#3ccf9e"),
    ("#a8478a", "#e08cc7"),
    ("#8a6d00", "#dcc04a"),
    ("#5b4bb5", "#a99cf5"),
    ("#a32d2d", "#f28b82"),
    ("#4d5761", "#b4bec8"),
)
INK, FAINT, GRID = ("#1c2127", "#e6e9ed"), ("#5c6670", "#9aa4ae"), ("#d9dde2", "#333b45")
THEME = {"ink": INK, "faint": FAINT, "grid": GRID} | {f"line-{i}": pair for i, pair in enumerate(PALETTE)}
MISSING = "spo report draws with packages that are not installed: pip install 'spo-trainer[report]'"
LONGEST_LABEL = 28
SIZE = (5.6, 3.1)  # inches of a chart


def check_installed() -> None:
    """Raise `UserError` where what reports need is not installed."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(MISSING) from None


def svg(chart: Chart) -> str:
    """The chart as an SVG element whose colours are the page's variables (`--line-0`, `--ink`, ...)."""
    figure = _figure(chart)
    buffer = io.StringIO()
    with _style(f"spo-{chart.name}"):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = buffer.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    for name, (light, _) in THEME.items():
        drawn = drawn.replace(light, f"var(--{name})")
    # A page has its own fonts, and an own size for each chart; matplotlib's description of itself names addresses.
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg class="chart" viewBox="\1" role="img">', drawn, count=1)
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn.replace("xlink:href", "href"))
    return re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", drawn)


def png(chart: Chart, path: Path) -> None:
    """Write the chart as a picture, light."""
    figure = _figure(chart)
    figure.suptitle(_text(chart.title), fontsize=11, color=INK[0])
    with _style(chart.name):
        figure.savefig(path, format="png", dpi=200, facecolor="white")


def _style(salt: str) -> Any:
    import matplotlib

    # Texts stay texts, and no formulas. Names inside of an SVG come from the salt: they must differ on one page.
    return matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "text.parse_math": False})


def _figure(chart: Chart) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    with _style(chart.name):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        if chart.level is not None:
            axes.axhline(chart.level, color=FAINT[0], linewidth=0.8, linestyle=(0, (4, 3)))
        for line in chart.lines:
            _draw(axes, line)
        axes.set_xlabel("learner steps", color=FAINT[0], fontsize=8.5)
        axes.set_ylabel(_text(chart.unit), color=FAINT[0], fontsize=8.5)
        axes.grid(color=GRID[0], linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(colors=FAINT[0], labelsize=8.5, length=0)
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(GRID[0])
        if chart.is_share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        if chart.ends is not None:
            margin = 0.02 * (chart.ends[1] - chart.ends[0])
            axes.set_ylim(chart.ends[0] - margin, chart.ends[1] + margin)
        if sum(bool(line.label) and not line.faint for line in chart.lines) > 1:
            legend = axes.legend(frameon=False, fontsize=8.5, labelcolor=INK[0], ncols=2, loc="best")
            legend.set_zorder(5)
    return figure


def _draw(axes: Any, line: Line) -> None:
    colour = PALETTE[line.colour % len(PALETTE)][0]
    if line.lows is not None and line.highs is not None:
        axes.fill_between(line.versions, line.lows, line.highs, color=colour, alpha=0.18, linewidth=0)
    # A line of one point would not be seen.
    marker = "o" if line.marked or np.size(line.versions) == 1 else None
    axes.plot(
        line.versions,
        line.values,
        color=colour,
        linewidth=0.7 if line.faint else 1.6,
        alpha=0.4 if line.faint else 1.0,
        marker=marker,
        markersize=3.5,
        label=_text(shortened(line.label)) if line.label and not line.faint else "_nolegend_",
    )


def shortened(label: str) -> str:
    """A label that leaves room for the chart."""
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"


def _text(text: str) -> str:
    """A text that matplotlib draws as it is: without control characters, and not as a name to be hidden."""
    escaped = one_line(text)
    return f" {escaped}" if escaped.startswith("_") else escaped
