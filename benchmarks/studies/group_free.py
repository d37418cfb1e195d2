"""What waiting for groups costs if episodes have long tails, simulated and on the real pipeline.

Batches are of 24 samples, groups of 8. In `one wave` 48 episodes start together, until the first batch; `continuous`
runs continue with `max_staleness` 4. Rows with `wave` are simulations of one tail; the others are phases of real runs,
with the seconds at which each wave or batch was full.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import plots, tables

SCALE = 0.02  # real seconds for a second of the setting
PUBLISHED = 4.35  # the speed-up of the SPO paper's simulation
STALENESS = {"1": ":", "4": "-", "16": "-."}  # simulated values of `max_staleness`, and their lines
REAL = "4"  # the one that was also measured
HEADS = ["σ", "one wave: group-free", "grouped", "speed-up", "real speed-up",
         "speed-up if the grouped wave starts only 24",
         "continuous: group-free", "grouped", "speed-up", "real speed-up"]  # fmt: skip
Row = dict[str, Any]


def table(rows: Sequence[Row]) -> str:
    """Seconds of a batch and speed-ups by tail; in brackets 5 to 95%."""
    lines = []
    for row in (row for row in rows if "wave" in row):
        wave, continuous = row["wave"], row["continuous"][REAL]
        real_wave, real_continuous = (measured(rows, row["sigma"], one) for one in (False, True))
        if real_wave:
            of_wave = [*_cells(wave), _speedup(real_wave), f"{row['three_groups']:.2f}"]
            lines.append([f"{row['sigma']:g}", *of_wave, *_cells(continuous), _speedup(real_continuous)])
    return tables.table(HEADS, lines)


def measured(rows: Sequence[Row], sigma: float, continuous: bool) -> Row | None:
    """Figures of the real waves or continuous phases; None if none was measured."""
    phases = [row for row in rows if "ahead" in row and (row["sigma"], bool(row["ahead"])) == (sigma, continuous)]
    if not phases:
        return None
    free, grouped = (np.concatenate([_seconds(row, side) for row in phases]) / SCALE for side in ("free", "grouped"))
    ratios = grouped / free
    speedup = float(grouped.mean() / free.mean())
    return {"speedup": speedup, "band": np.quantile(ratios, (0.05, 0.95)).tolist()}


def plot(rows: Sequence[Row], target: Path) -> None:
    """Simulated speed-ups as lines and real ones as points, beside the paper's."""
    simulated = [row for row in rows if "wave" in row]
    sigmas = [row["sigma"] for row in simulated]
    figure, ((wave, continuous),) = plots.panels(1, 2, 4.7, 3.9, dpi=130)
    low, high = zip(*(row["wave"]["band"] for row in simulated), strict=True)
    wave.fill_between(sigmas, low, high, alpha=0.15, color="C0", label="simulated, 5 to 95% of waves")
    wave.plot(sigmas, [row["wave"]["speedup"] for row in simulated], color="C0", label="simulated")
    without_spare = [row["three_groups"] for row in simulated]
    wave.plot(sigmas, without_spare, color="C2", linestyle=":", label="simulated, grouped starts only 24")
    wave.set_title("one wave: the first 24 of 48", fontsize=10)
    wave.set_ylabel("group-free: times as fast")
    for staleness, style in STALENESS.items():
        ratios = [row["continuous"][staleness]["speedup"] for row in simulated]
        colour, label = "C0" if staleness == REAL else "grey", f"simulated, max_staleness {staleness}"
        continuous.plot(sigmas, ratios, color=colour, linestyle=style, label=label)
    continuous.set_title("continuous: every episode is used", fontsize=10)
    for axis in (wave, continuous):
        points = {sigma: figures for sigma in sigmas if (figures := measured(rows, sigma, axis is continuous))}
        ratios = [figures["speedup"] for figures in points.values()]
        errors = np.abs(np.array([figures["band"] for figures in points.values()]).T - ratios)
        axis.errorbar(list(points), ratios, errors, color="C3", fmt="o", capsize=3, label="real, 5 to 95%")
        axis.axhline(PUBLISHED, color="black", linestyle="--", linewidth=1, label=f"SPO paper, {PUBLISHED:.2f}")
        axis.set_xlabel("tail of a tool call: σ of its logarithm")
        axis.legend(frameon=False, fontsize=7.5, loc="upper left")
    wave.set_ylim(0.8, 7)
    plots.save(figure, target)


def _seconds(row: Row, side: str) -> np.ndarray:
    """Seconds of each wave; or, in a continuous phase, of a batch, for each stretch of `staleness` + 1 batches.

    Batches of a stretch are full at the same time, since they wait for the same episodes.
    """
    times = np.array(row[side])
    stride = row["staleness"] + 1
    return np.diff(times[row["staleness"] :: stride]) / stride if row["ahead"] else times


def _cells(figures: Row) -> list[str]:
    return [f"{figures['free']:.0f} s", f"{figures['grouped']:.0f} s", _speedup(figures)]


def _speedup(figures: Row | None) -> str:
    if figures is None:
        return ""
    low, high = figures["band"]
    return f"{figures['speedup']:.2f}" + (f" ({low:.2f}–{high:.2f})" if high - low > 0.005 else "")
