"""The pictures of the study: held-out accuracy against samples, and the variance ratio against visits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot

from benchmarks.values.study import BATCH, METHODS, StudyRun

COLOURS = dict(zip(METHODS, ("C0", "C9", "C1", "black", "C3", "C4", "C2", "C6"), strict=True))


def plot_accuracy(results: dict[StudyRun, dict[str, Any]], target: Path) -> None:
    """A panel for each task, and batch and number of visits, without offline values; bands are twice the error."""
    tasks = _kinds(results)[0]
    columns = sorted({(job.batch, job.visits) for job in results}, key=lambda column: (-column[0], column[1]))
    figure, axes = pyplot.subplots(
        len(tasks), len(columns), figsize=(3.6 * len(columns), 3.1 * len(tasks)), dpi=120, sharey="row", squeeze=False
    )
    for (i, task), (j, (batch, visit)) in ((a, b) for a in enumerate(tasks) for b in enumerate(columns)):
        axis = axes[i, j]
        axis.set_visible(any((job.task, job.batch, job.visits) == (task, batch, visit) for job in results))
        for method in METHODS:
            same = {job: r for job, r in results.items() if job.batch == batch and _is(job, task, visit, method)}
            if not same:
                continue
            curves = [result["accuracy"] for result in same.values()]
            samples = np.array([version for version, _ in curves[0]]) * batch
            accuracy = np.array([[100 * value for _, value in curve] for curve in curves])
            middle, error = accuracy.mean(0), _error(accuracy)
            axis.plot(samples, middle, color=COLOURS[method], linewidth=1.3, label=method)
            axis.fill_between(samples, middle - error, middle + error, color=COLOURS[method], alpha=0.12, linewidth=0)
        of_batch = "" if batch == BATCH else f", batches of {batch}"
        axis.set_title(f"{task}, {visit:g} visit{'s' if visit != 1 else ''} a prompt{of_batch}", fontsize=10)
        axis.grid(alpha=0.3)
        if i == len(tasks) - 1:
            axis.set_xlabel("samples")
        if j == 0:
            axis.set_ylabel("held-out accuracy, %")
            axis.legend(frameon=False, fontsize=7.5)
    _save(figure, target)


def plot_variance(results: dict[StudyRun, dict[str, Any]], target: Path) -> None:
    """Var(r - b) / Var(r) of each method against visits; hollow where the run began from offline values."""
    results = {job: result for job, result in results.items() if job.batch == BATCH}
    tasks, visits = _kinds(results)
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(4.6 * len(tasks), 3.6), dpi=120, sharey=True, squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for method in METHODS:
            for offline in sorted({job.offline for job in results}):
                points = {
                    visit: np.array(found)
                    for visit in visits
                    if (
                        found := [
                            r["variance_ratio"] for job, r in results.items() if _is(job, task, visit, method, offline)
                        ]
                    )
                }
                axis.errorbar(
                    list(points),
                    [found.mean() for found in points.values()],
                    [float(_error(found)) for found in points.values()],
                    color=COLOURS[method],
                    marker="o",
                    markersize=5,
                    markerfacecolor="white" if offline else COLOURS[method],
                    linestyle=":" if offline else "-",
                    capsize=2,
                    label=(f"{method}, {offline} offline scores" if offline else method) if points else None,
                )
        axis.set_title(task, fontsize=10)
        axis.set_xscale("log")
        axis.set_xticks(visits, [f"{visit:g}" for visit in visits])
        axis.set_xlabel("visits a prompt")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("variance of the advantage over that of the reward")
    axes[0, -1].legend(frameon=False, fontsize=7)
    _save(figure, target)


def _kinds(results: dict[StudyRun, dict[str, Any]]) -> tuple[list[str], list[float]]:
    return sorted({job.task for job in results}), sorted({job.visits for job in results})


def _is(job: StudyRun, task: str, visits: float, method: str, offline: int = 0) -> bool:
    return (job.task, job.visits, job.method, job.offline) == (task, visits, method, offline)


def _error(values: np.ndarray) -> np.ndarray:
    """Twice the standard error over the first dimension; 0 of one value."""
    return 2 * values.std(0, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.zeros(values.shape[1:])


def _save(figure: Any, target: Path) -> None:
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)
