"""The study's figure: accuracy against learner steps, a row of panels a group of variants, a column a staleness."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot

from common.errors import UserError


def plot(
    results: Mapping[tuple[str, int], list[dict[str, Any]]],
    groups: Mapping[str, Iterable[str]],
    reference: str,
    target: Path,
) -> None:
    """Draw results, given by variant and staleness: the mean of the seeds, in a band from the lowest to the highest.

    Args:
        groups: names of variants by the title of their panels.
        reference: a variant that is drawn in each panel, dotted and without a band.

    Raises:
        UserError: there are no results to draw.
    """
    if not results:
        raise UserError("the results file holds none of these jobs; run them first, without --plot")
    ages = sorted({staleness for _, staleness in results})
    shown = {title: [n for n in names if any((n, age) in results for age in ages)] for title, names in groups.items()}
    shown = {title: names for title, names in shown.items() if names}
    size = 2.9 * len(ages) + 2.4, 2.3 * len(shown) + 0.4
    figure, axes = pyplot.subplots(len(shown), len(ages), figsize=size, dpi=90, sharey=True, squeeze=False)
    for (title, names), line in zip(shown.items(), axes, strict=True):
        colours = {name: f"C{number}" for number, name in enumerate(n for n in names if n != reference)}
        legend: dict[str, Any] = {}
        for age, axis in zip(ages, line, strict=True):
            for name, colour in {reference: "black", **colours}.items():
                rows = results.get((name, age), ())
                if not rows:
                    continue
                steps, accuracy = np.array([row["accuracy"] for row in rows]).transpose(2, 0, 1)  # [seeds, points]
                style = ":" if name == reference else "-"
                (legend[name],) = axis.plot(steps[0], accuracy.mean(0), style, color=colour, linewidth=1.6)
                if name != reference:
                    axis.fill_between(steps[0], accuracy.min(0), accuracy.max(0), color=colour, alpha=0.1, linewidth=0)
            axis.set_ylim(0, 1.02)
            axis.grid(alpha=0.3)
        line[0].set_ylabel(textwrap.fill(title, 20), fontsize=9)
        place = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5), "frameon": False, "fontsize": 8}
        line[-1].legend(legend.values(), legend, **place)
    for age, top, bottom in zip(ages, axes[0], axes[-1], strict=True):
        top.set_title(f"staleness {age}", fontsize=10)
        bottom.set_xlabel("learner steps")
    figure.suptitle("held-out accuracy", fontsize=11)
    figure.tight_layout()
    figure.savefig(target, pil_kwargs={"optimize": True})
