"""The figures of a comparison: of each run, and of each line with the spread over its runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from launcher.compare.groups import Group
from launcher.report.curves import WINDOW, Chart, Line, finite, learner_rate
from launcher.report.evaluations import Evaluation, accuracy, accuracy_bands
from launcher.report.run_data import RunData
from launcher.report.statistics import Band, Curve, first_reaching, over_runs, smoothed, spread
from launcher.report.time_budget import time_budget

# Charts beside the accuracy: name, title, metric, its process, unit, level to compare with.
METRICS: tuple[tuple[str, str, str, str, str, float | None], ...] = (
    ("reward", "Reward in training", "reward/mean", "sampler", "", None),
    ("variance-ratio", "What the values leave of the variance", "tracker/variance_ratio", "sampler", "", 1.0),
    ("entropy", "Entropy of the policy", "actor/entropy", "learner", "nats a token", None),
    ("divergence", "Divergence from the rollout policy", "rollout_corr/k3_kl", "learner", "nats a token", None),
)


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run in numbers; NaN where it has none.

    Attributes:
        reward: mean of the last batches.
        samples: that informed the tracker until the threshold was reached.
        seconds: from the first to the last measurement.
        tokens_per_second: sampled tokens that were trained on, by the run's time.
    """

    before: float
    after: float
    reward: float
    samples: float
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class LineFigures:
    """A line: each figure's mean over the runs that have it, lowest and highest; None where no run has it.

    Attributes:
        reached: how many of the runs reached the threshold.
    """

    label: str
    runs: int
    before: Band | None
    after: Band | None
    reward: Band | None
    samples: Band | None
    seconds: Band | None
    tokens_per_second: Band | None
    reached: int


def default_threshold(runs: Sequence[RunData]) -> float | None:
    """The highest accuracy that all evaluated runs have reached; None where none was evaluated."""
    best = [float(curve.values.max()) for run in runs if len((curve := _accuracy(run)).values)]
    return min(best, default=None)


def line_figures(group: Group, threshold: float | None) -> LineFigures:
    """The figures of a line; the band of a single run's accuracy is that over its prompts."""
    figures = [_figures(run, threshold) for run in group.runs]
    samples = _spread(figures, lambda one: one.samples)
    before, after = _spread(figures, lambda one: one.before), _spread(figures, lambda one: one.after)
    if len(group.runs) == 1 and before is not None:
        bands = [band for _, band in accuracy_bands(_ends(group.runs[0]), group.runs[0].full_reward)]
        before, after = bands[0], bands[-1]
    return LineFigures(
        group.label,
        len(group.runs),
        before,
        after,
        _spread(figures, lambda one: one.reward),
        samples,
        _spread(figures, lambda one: one.seconds),
        _spread(figures, lambda one: one.tokens_per_second),
        sum(math.isfinite(one.samples) for one in figures),
    )


def comparison_charts(groups: Sequence[Group]) -> list[Chart]:
    """Each curve with a line a group: mean of its runs, between the lowest and the highest."""
    band = "Mean of the runs of a line, between the lowest and the highest." if _several(groups) else ""
    mean = f"Mean of the last {WINDOW} steps. {band}".strip()
    lines = [_line(group, i, _accuracy, marked=True) for i, group in enumerate(groups)]
    made = [Chart("accuracy", "Held-out accuracy", lines, note=band, is_share=True, ends=(0.0, 1.0))]
    for name, title, metric, process, unit, level in METRICS:
        lines = [_line(group, i, partial(_smoothed, metric, process)) for i, group in enumerate(groups)]
        made.append(Chart(name, title, lines, unit, mean, level=level))
    lines = [_line(group, i, lambda run: learner_rate(run.metrics)) for i, group in enumerate(groups)]
    made.append(Chart("throughput", "Tokens trained on", lines, "tokens/s", mean))
    return [chart for chart in made if any(len(line.versions) for line in chart.lines)]


def _smoothed(metric: str, process: str, run: RunData) -> Curve:
    return smoothed(finite(run.metrics.series(metric, process)), WINDOW)


def _line(group: Group, position: int, curve: Callable[[RunData], Curve], *, marked: bool = False) -> Line:
    versions, means, lows, highs = over_runs([curve(run) for run in group.runs])
    if len(group.runs) == 1:
        return Line(group.label, versions, means, marked=marked, colour=position)
    label = f"{group.label} ({len(group.runs)} runs)"
    return Line(label, versions, means, lows, highs, marked=marked, colour=position)


def _several(groups: Sequence[Group]) -> bool:
    return any(len(group.runs) > 1 for group in groups)


def _figures(run: RunData, threshold: float | None) -> RunFigures:
    curve, reward = _accuracy(run), finite(run.metrics.series("reward/mean", "sampler")).values
    tokens = float(np.nansum(run.metrics.series("tokens/model", "learner").values))
    seconds = time_budget(run).total or math.nan
    reached = None if threshold is None else first_reaching(curve, threshold)
    return RunFigures(
        before=float(curve.values[0]) if len(curve.values) else math.nan,
        after=float(curve.values[-1]) if len(curve.values) else math.nan,
        reward=float(reward[-WINDOW:].mean()) if len(reward) else math.nan,
        samples=math.nan if reached is None else _samples_until(run, reached),
        seconds=seconds,
        tokens_per_second=tokens / seconds if tokens else math.nan,
    )


def _samples_until(run: RunData, version: int) -> float:
    """Training samples that were counted until a version was there."""
    versions, _, values = run.metrics.series("samples/rewarded", "sampler")
    if not len(versions):
        batch_size = run.values.get("sampler.batch_size")
        return float(version * batch_size) if isinstance(batch_size, int) else math.nan
    # In TensorBoard files of earlier releases a batch has the version that it was trained by.
    made = versions + 1 if run.metrics.from_event_files else versions
    return float(np.interp(version, np.concatenate([[0], made]), np.concatenate([[0.0], values])))


def _accuracy(run: RunData) -> Curve:
    return accuracy(run.evaluations, run.full_reward)


def _ends(run: RunData) -> list[Evaluation]:
    return [run.evaluations[0], run.evaluations[-1]]


def _spread(figures: Sequence[RunFigures], figure: Callable[[RunFigures], float]) -> Band | None:
    known = [value for one in figures if math.isfinite(value := figure(one))]
    return spread(known) if known else None
