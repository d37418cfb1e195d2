"""Draws a chart of lines as SVG, for places that run no scripts, such as notebooks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from launcher.page.charts import Chart, Line

WIDTH, HEIGHT = 380, 200
LEFT, RIGHT, TOP, BOTTOM = 48, 8, 26, 22
COLOURS = ("#2f6fd0", "#d5772a", "#2b9a68", "#8a58c9", "#c8446a", "#1f93a6")
Point = tuple[float, float]


def svg(chart: Chart) -> str:
    """The chart as an `<svg>` element, whose text inherits the page's colour; "" if the chart has no points."""
    lines = [(line, points) for line in chart["lines"] if (points := _points(line, "y"))]
    if not lines:
        return ""
    everything = [point for line, points in lines for point in (*points, *_points(line, "low"), *_points(line, "high"))]
    (left, right), (low, high) = (_range([point[axis] for point in everything]) for axis in (0, 1))

    def place(point: Point) -> str:
        x = LEFT + (point[0] - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (point[1] - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f},{y:.1f}"

    parts = [*_frame(chart, (left, right), (low, high)), *_legend([line["label"] for line, _ in lines])]
    for number, (line, points) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        if band := [*_points(line, "high"), *reversed(_points(line, "low"))]:
            parts.append(f'<polygon points="{" ".join(map(place, band))}" fill="{colour}" opacity="0.15"/>')
        faint = ' opacity="0.3"' if line.get("faint") else ""
        drawn = " ".join(map(place, points))
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.8"{faint}/>')
    return f'<svg width="{WIDTH}" height="{HEIGHT}" font-size="11" fill="currentColor">{"".join(parts)}</svg>'


def _points(line: Line, side: str) -> list[Point]:
    return [(x, y) for x, y in zip(line["x"], line.get(side, ()), strict=False) if x is not None and y is not None]


def _range(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _frame(chart: Chart, across: tuple[float, float], up: tuple[float, float]) -> Iterator[str]:
    """Title, axes, and the ends of each axis."""
    bottom = HEIGHT - BOTTOM
    yield f'<text x="{LEFT}" y="14" font-weight="bold">{escape(chart["title"])}</text>'
    path = f"M{LEFT},{TOP}V{bottom}H{WIDTH - RIGHT}"
    yield f'<path d="{path}" fill="none" stroke="currentColor" opacity="0.4"/>'
    for y, value in ((bottom, up[0]), (TOP + 8, up[1])):
        yield f'<text x="{LEFT - 4}" y="{y}" text-anchor="end">{value:.3g}</text>'
    for x, anchor, value in ((LEFT, "start", math.ceil(across[0])), (WIDTH - RIGHT, "end", math.floor(across[1]))):
        yield f'<text x="{x}" y="{HEIGHT - 6}" text-anchor="{anchor}">{value:,}</text>'
    yield f'<text x="{WIDTH // 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart["x"])}</text>'


def _legend(labels: list[str]) -> Iterator[str]:
    for number, label in enumerate(labels if len(labels) > 1 else []):
        colour, x = COLOURS[number % len(COLOURS)], WIDTH - RIGHT - 4
        y = HEIGHT - BOTTOM - 6 - 13 * (len(labels) - 1 - number)
        yield f'<text x="{x}" y="{y}" text-anchor="end" fill="{colour}">{escape(label)}</text>'
