"""A comparison as plain data, and as a page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from launcher.compare.figures import LineFigures, comparison_charts, default_threshold, line_figures
from launcher.compare.groups import Group, differences, group_runs, other_tasks
from launcher.compare.text import cells, title
from launcher.report.page import render
from launcher.report.run_data import RunData

NOTE = (
    "The range of a mean: of several runs the lowest and the highest; of a single run's accuracy, 95% over prompts. "
    "Reward: mean of the last batches. Tokens: sampled and trained on, by the run's whole time."
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several runs side by side.

    Attributes:
        differing: keys of the configuration that are not the same in all lines, with the value of each line.
        columns: names of the figures.
        note: what the figures mean.
    """

    groups: list[Group]
    lines: list[LineFigures]
    differing: dict[str, list[str]]
    columns: list[str]
    warnings: list[str]
    note: str


def compared(runs: Sequence[RunData], by: Sequence[str], threshold: float | None) -> Comparison:
    """Compare runs.

    Args:
        by: see `group_runs`.
        threshold: of the held-out accuracy; None: the highest that all of them have reached.

    Raises:
        UserError: none of the runs has a key of `by`.
    """
    groups = group_runs(runs, by)
    if threshold is None:
        threshold = default_threshold(runs)
    to_threshold = "samples" if threshold is None else f"samples to {threshold:.1%}"
    return Comparison(
        groups,
        [line_figures(group, threshold) for group in groups],
        differences([group.runs[0] for group in groups]),
        ["accuracy before", "after", "reward", to_threshold, "time", "tok/s"],
        list(_warnings(runs, groups, by)),
        NOTE,
    )


def _warnings(runs: Sequence[RunData], groups: Sequence[Group], by: Sequence[str]) -> list[str]:
    warnings = []
    if tasks := other_tasks(runs):
        warnings.append(f"the runs learn different tasks ({', '.join(tasks)}), so their figures cannot be compared")
    for group in groups if by else ():
        within = [key for key in differences(group.runs) if key not in by]
        if within:
            warnings.append(f"the runs of {group.label} differ in more than their seed: {', '.join(within)}")
    unfinished = [f"{run.name} ({run.state})" for run in runs if not run.is_over]
    if unfinished:
        warnings.append(f"not finished: {', '.join(unfinished)}")
    unevaluated = [run.name for run in runs if not run.evaluations]
    if unevaluated:
        warnings.append(f"without a held-out evaluation: {', '.join(unevaluated)}")
    return warnings


def page(comparison: Comparison) -> str:
    """The comparison as one self-contained page."""
    return render(
        "compare.html",
        comparison_charts(comparison.groups),
        comparison=comparison,
        rows=[(title(line), cells(line)) for line in comparison.lines],
        made=time.strftime("%Y-%m-%d %H:%M"),
        release=version("spo-trainer"),
    )
