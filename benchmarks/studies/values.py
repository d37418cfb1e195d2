"""What values of single streams, groups, a critic and no baseline are worth."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import plots, tables

# Methods, and their colours.
METHODS = {
    "spo": "C0",
    "spo, by family": "C9",
    "spo, paper's prior": "C1",
    "no baseline": "black",
    "grpo, groups of 8": "C3",
    "rloo, groups of 8": "C4",
    "critic": "C2",
    "tracker and critic": "C6",
}
BATCH = 128  # samples of a step if a row does not name them
HEADS = ["task", "batch", "visits", "offline scores", "method", "accuracy at the end", "mean of the curve",
         "less that of spo", "at equal time", "variance ratio", "no signal", "seconds", "seeds"]  # fmt: skip
Row = dict[str, Any]
Case = tuple[str, int, float]  # task, batch, visits a prompt


def table(rows: Sequence[Row]) -> str:
    """Mean of the seeds ± twice its standard error; differences are paired by seed.

    Equal time is when the method that finishes first is done, the time for offline values included; seconds are of
    training alone.
    """
    kinds: dict[tuple[Case, int], dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    ends: dict[tuple[Case, int], float] = defaultdict(lambda: math.inf)
    for row in rows:
        job, case = row["job"], _case(row)
        kinds[case, job["offline"]][job["method"]][job["seed"]] = row
        ends[case, job["seed"]] = min(ends[case, job["seed"]], row["training_seconds"][-1] + row["offline_seconds"])
    lines = []
    for (case, offline), by_method in sorted(kinds.items()):
        for method in (name for name in METHODS if name in by_method):
            seeds, spo = by_method[method], by_method["spo"]
            leads = [_mean(row) - _mean(spo[seed]) for seed, row in seeds.items() if seed in spo and method != "spo"]
            figures = [
                [row["accuracy"][-1][1] for row in seeds.values()],
                [_mean(row) for row in seeds.values()],
                leads,
                [_accuracy_at(ends[case, seed], row) for seed, row in seeds.items()],
                [row["variance_ratio"] for row in seeds.values()],
                [row["without_signal"] for row in seeds.values()],
            ]
            seconds = np.mean([row["training_seconds"][-1] for row in seeds.values()])
            task, batch, visits = case
            head = [task, str(batch), f"{visits:g}", str(offline), method]
            lines.append([*head, *map(tables.band, figures), f"{seconds:.0f}", str(len(seeds))])
    return tables.table(HEADS, lines)


def runs_table(rows: Sequence[Row]) -> str:
    """Variance ratio of real runs by task, visits and baseline, and of an oracle of the groups."""
    kinds: dict[tuple[str, float, str], list[Row]] = defaultdict(list)
    for row in rows:
        kinds[row["task"], row["visits"], row["baseline"]].append(row)
    lines = [
        [task, f"{visits:g}", name, *(_listed([row[key] for row in same]) for key in ("variance_ratio", "oracle"))]
        for (task, visits, name), same in sorted(kinds.items())
    ]
    return tables.table(["task", "visits", "baseline", "variance ratio, by seed", "oracle of the groups"], lines)


def features_table(rows: Sequence[Row]) -> str:
    """The share of the rewards' variance that each estimator leaves, by seed."""
    kinds: dict[str, list[dict[str, float]]] = defaultdict(list)
    for row in rows:
        kinds[row["mixture"]].append(row["left"])
    lines = [
        [mixture, name, _listed([left[name] for left in same])]
        for mixture, same in sorted(kinds.items())
        for name in same[0]
    ]
    return tables.table(["mixture", "estimator", "variance left, by seed"], lines)


def plot_accuracy(rows: Sequence[Row], target: Path) -> None:
    """Held-out accuracy against samples, without offline values: a panel for each task, and batch and visits."""
    rows = [row for row in rows if not row["job"]["offline"]]
    tasks = sorted({_case(row)[0] for row in rows})
    columns = sorted({_case(row)[1:] for row in rows}, key=lambda column: (-column[0], column[1]))
    figure, axes = plots.panels(len(tasks), len(columns), 3.6, 3.1)
    for i, task in enumerate(tasks):
        for j, (batch, visits) in enumerate(columns):
            axis, same = axes[i, j], [row for row in rows if _case(row) == (task, batch, visits)]
            axis.set_visible(bool(same))
            for method, colour in METHODS.items():
                curves = np.array([row["accuracy"] for row in same if row["job"]["method"] == method])
                if len(curves):
                    plots.curve(axis, curves[0, :, 0] * batch, 100 * curves[:, :, 1], colour, method)
            of_batch = "" if batch == BATCH else f", batches of {batch}"
            axis.set_title(f"{task}, {visits:g} visit{'s' * (visits != 1)} a prompt{of_batch}", fontsize=10)
            axis.set_xlabel("samples")
        axes[i, 0].set_ylabel("held-out accuracy, %")
        axes[i, 0].legend(frameon=False, fontsize=7.5)
    plots.save(figure, target)


def plot_variance(rows: Sequence[Row], target: Path) -> None:
    """Variance ratio of each method against visits; hollow if the run began from offline values."""
    tasks, visits = sorted({_case(row)[0] for row in rows}), sorted({_case(row)[2] for row in rows})
    figure, axes = plots.panels(1, len(tasks), 4.6, 3.6)
    for axis, task in zip(axes[0], tasks, strict=True):
        kinds: dict[tuple[str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for job, ratio in ((row["job"], row["variance_ratio"]) for row in rows if row["job"]["task"] == task):
            kinds[job["method"], job["offline"]][job["visits"]].append(ratio)
        for (method, offline), points in sorted(kinds.items()):
            x, ratios = zip(*sorted(points.items()), strict=True)
            means, errors = zip(*((np.mean(same), tables.twice_error(same)) for same in ratios), strict=True)
            colour, label = METHODS[method], f"{method}, {offline} offline scores" if offline else method
            hollow = {"markerfacecolor": "white", "linestyle": ":"} if offline else {}
            axis.errorbar(x, means, errors, color=colour, marker="o", markersize=5, capsize=2, label=label, **hollow)
        axis.set_title(task, fontsize=10)
        axis.set_xscale("log")
        axis.set_xticks(visits, [f"{visit:g}" for visit in visits])
        axis.set_xlabel("visits a prompt")
    axes[0, 0].set_ylabel("variance of the advantage over that of the reward")
    axes[0, -1].legend(frameon=False, fontsize=7)
    plots.save(figure, target)


def _case(row: Row) -> Case:
    job = row["job"]
    return job["task"], job.get("batch", BATCH), job["visits"]


def _mean(row: Row) -> float:
    """Accuracy over the run: the mean of its evaluations."""
    return float(np.mean([accuracy for _, accuracy in row["accuracy"]]))


def _accuracy_at(seconds: float, row: Row) -> float:
    """Held-out accuracy `seconds` after the start, interpolated between evaluations."""
    times = np.array(row["training_seconds"]) + row["offline_seconds"]
    return float(np.interp(seconds, times, [accuracy for _, accuracy in row["accuracy"]]))


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)
