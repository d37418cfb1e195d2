"""The study's figure: accuracy against learner step, a panel a staleness, a colour a variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot

from common.errors import UserError


def plot(results: dict[tuple[str, int], list[dict[str, Any]]], by_token: Sequence[str], target: Path) -> None:
    """Draw results, given by variant and staleness: thick, the mean of the seeds; thin, each of them.

    Args:
        by_token: variants that get a panel of their own at the highest staleness.

    Raises:
        UserError: there are no results to draw.
    """
    if not results:
        raise UserError("the results file holds none of these jobs; run them first, without --plot")
    variants = list(dict.fromkeys(variant for variant, _ in results))
    colours = {name: pyplot.get_cmap("tab20")(2 * i % 20 + i // 10) for i, name in enumerate(variants)}
    *lower, highest = sorted({staleness for _, staleness in results})
    panels: list[tuple[str, int, Sequence[str]]] = [(f"staleness {age}", age, variants) for age in lower]
    by_row = [name for name in variants if name not in by_token]
    panels += [
        (f"staleness {highest}: by row, or bypass", highest, by_row),
        (f"{highest}: by single tokens", highest, by_token),
    ]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.4 * len(panels), 4.4), dpi=130, sharey=True)
    shown: dict[str, Any] = {}
    for axis, (title, age, names) in zip(axes, panels, strict=True):
        for name in names:
            curves = [np.array(row["accuracy"]) for row in results.get((name, age), ())]
            for curve in curves:
                axis.plot(curve[:, 0], curve[:, 1], color=colours[name], linewidth=0.5, alpha=0.3)
            if curves:
                (shown[name],) = axis.plot(*np.mean(curves, 0).T, color=colours[name], linewidth=1.8)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("learner steps")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out accuracy")
    legend = [shown[name] for name in variants], variants
    figure.legend(*legend, loc="lower center", ncols=5, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    figure.savefig(target)
