"""Which curves a report shows, and from which metrics: plain data, drawn by `charts.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from launcher.folder.metrics import Metrics
from launcher.folder.series import Series
from launcher.report.evaluations import accuracy_bands
from launcher.report.run_data import RunData
from launcher.report.statistics import Curve, smoothed

WINDOW = 10  # steps that a noisy curve is averaged over
MOST_LINES = 8  # of one chart
_AGES = {"": "", "_plus": "+", "_4": "–4"}  # how the names of ages go on


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: `versions` and `values` float64 [N], and where there is a band its ends [N].

    Attributes:
        faint: behind the others: single steps of what another line has smoothed.
        marked: each value has a dot, since there are few.
        colour: position in the palette.
    """

    label: str
    versions: np.ndarray
    values: np.ndarray
    lows: np.ndarray | None = None
    highs: np.ndarray | None = None
    faint: bool = False
    marked: bool = False
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture.

    Attributes:
        name: of its PNG file.
        note: what a reader must know about it.
        is_share: values are shares of 1, shown as percentages.
        level: a line to compare with.
        ends: of the values' axis; None: as the values are.
    """

    name: str
    title: str
    lines: list[Line]
    unit: str = ""
    note: str = ""
    is_share: bool = False
    level: float | None = None
    ends: tuple[float, float] | None = None


def charts(run: RunData) -> list[Chart]:
    """The charts for which the run has any values."""
    made = (
        _accuracy(run),
        _accuracy_by_set(run),
        _reward(run),
        _by_source(run),
        _staleness(run.metrics),
        _throughput(run.metrics),
        _variance_ratio(run.metrics),
        _correction(run.metrics),
        _divergence(run.metrics),
        _lengths(run.metrics),
        _cut_off(run.metrics),
        _entropy(run.metrics),
    )
    return [chart for chart in made if any(len(line.versions) for line in chart.lines)]


def noisy(series: Series, label: str, colour: int = 0) -> Iterator[Line]:
    """The values of single steps faintly, and their mean over the last steps; of few steps, the values alone."""
    curve = finite(series)
    if len(curve.versions) < 3 * WINDOW:
        yield Line(label, *curve, colour=colour)
        return
    yield Line("", *curve, faint=True, colour=colour)
    yield Line(label, *smoothed(curve, WINDOW), colour=colour)


def finite(series: Series) -> Curve:
    """A series without what could not be measured."""
    known = np.isfinite(series.values)
    return Curve(series.versions[known].astype(float), series.values[known])


def learner_rate(metrics: Metrics) -> Curve:
    """Tokens that the learner trained on a second, over the last steps, with its waiting for batches."""
    versions, _, tokens = metrics.series("tokens/total", "learner")
    seconds = np.zeros(len(versions))
    for name in metrics.names("learner"):
        if name.startswith("seconds/"):
            part = metrics.series(name, "learner")
            known = np.isin(part.versions, versions)
            seconds[np.searchsorted(versions, part.versions[known])] += np.nan_to_num(part.values[known])
    known = (seconds > 0) & np.isfinite(tokens)
    steps = versions[known].astype(float)
    # A mean of the steps' own rates would be that of the quickest ones.
    rates = smoothed(Curve(steps, tokens[known]), WINDOW).values / smoothed(Curve(steps, seconds[known]), WINDOW).values
    return Curve(steps, rates)


def _accuracy(run: RunData) -> Chart:
    bands = list(accuracy_bands(run.evaluations, run.full_reward))
    versions = np.array([version for version, _ in bands], float)
    means, lows, highs = (np.array([band[i] for _, band in bands]) for i in range(3))
    note = "Share of responses with full reward; band: 95%, resampled by prompt."
    line = Line("all prompts", versions, means, lows, highs, marked=True)
    return Chart("accuracy", "Held-out accuracy", [line], note=note, is_share=True, ends=(0.0, 1.0))


def _accuracy_by_set(run: RunData) -> Chart:
    names = [
        match[1] for name in run.metrics.names("sampler") if (match := re.fullmatch("validation/(.+)/accuracy", name))
    ]
    lines = [
        Line(name, *finite(run.metrics.series(f"validation/{name}/accuracy", "sampler")), marked=True, colour=i)
        for i, name in enumerate(names[:MOST_LINES])
    ]
    left_out = len(names) - len(lines)
    note = f"{left_out} more are not shown." if left_out else ""
    return Chart("accuracy-by-set", "Held-out accuracy by set", lines, note=note, is_share=True, ends=(0.0, 1.0))


def _reward(run: RunData) -> Chart:
    lines = list(noisy(run.metrics.series("reward/mean"), "mean reward"))
    note = f"Of the samples of each batch; the line is the mean of the last {WINDOW}." if len(lines) > 1 else ""
    return Chart("reward", "Reward in training", lines, note=note or "Of the samples of each batch.")


def _by_source(run: RunData) -> Chart:
    names = [name for name in run.metrics.names("sampler") if re.fullmatch("source/(.+)/reward", name)]
    lines = [
        Line(
            name.split("/", 1)[1].removesuffix("/reward"), *smoothed(finite(run.metrics.series(name)), WINDOW), colour=i
        )
        for i, name in enumerate(names[:MOST_LINES])
    ]
    return Chart("reward-by-source", "Reward by data source", lines, note=f"Mean of the last {WINDOW} batches.")


def _staleness(metrics: Metrics) -> Chart:
    lines = [
        Line("oldest", *finite(metrics.series("staleness/max")), colour=1),
        Line("mean", *finite(metrics.series("staleness/mean")), colour=0),
    ]
    return Chart("staleness", "Staleness", lines, "versions", "Age of the samples of a batch when it is trained on.")


def _throughput(metrics: Metrics) -> Chart:
    name = "generator/tokens_per_second"
    processes = [process for process in metrics.processes() if name in metrics.names(process)]
    lines = [
        Line(process, *_by_step(metrics.timeline(name, process)), colour=i + 1)
        for i, process in enumerate(processes[: MOST_LINES - 1])
    ]
    lines.insert(0, Line("learner", *learner_rate(metrics), colour=0))
    note = f"Learner: tokens it trained on, over {WINDOW} steps with their waiting; generators: tokens they sampled."
    return Chart("throughput", "Throughput", lines, "tokens/s", note)


def _variance_ratio(metrics: Metrics) -> Chart:
    curve = finite(metrics.series("tracker/variance_ratio", "sampler"))
    ends = [finite(metrics.series(f"tracker/variance_ratio_{end}", "sampler")) for end in ("low", "high")]
    # The first batches have no band yet.
    lows, highs = (np.interp(curve.versions, *end, left=np.nan) if len(end.versions) else None for end in ends)
    line = Line("", *curve, lows, highs)
    note = "Variance of reward − value over that of the reward, within batches: below 1 the baseline helps."
    return Chart("variance-ratio", "What the values leave of the variance", [line], note=note, level=1.0)


def _correction(metrics: Metrics) -> Chart:
    names = {"effective sample size": "rollout_corr/eff_sample_size", "masked tokens": "rollout_corr/masked_fraction"}
    lines = [line for i, (label, name) in enumerate(names.items()) for line in noisy(metrics.series(name), label, i)]
    note = "Effective sample size as a share of the batch; tokens that rejection leaves out."
    return Chart("correction", "Off-policy correction", lines, note=note, is_share=True, ends=(0.0, 1.0))


def _divergence(metrics: Metrics) -> Chart:
    lines = list(noisy(metrics.series("rollout_corr/k3_kl"), "all tokens"))
    by_age = [(name, re.fullmatch(r"rollout_corr/age_(\d+)(.*)/k3_kl", name)) for name in metrics.names("learner")]
    ages = sorted((int(match[1]), match[2], name) for name, match in by_age if match)
    by_label = {f"age {age}{_AGES.get(rest, rest)}": metrics.series(name, "learner") for age, rest, name in ages}
    curves = [(label, series) for label, series in by_label.items() if len(series.versions) >= WINDOW]
    if len(curves) > 1:
        lines += [list(noisy(series, label, i + 1))[-1] for i, (label, series) in enumerate(curves)]
    note = f"Estimate of the KL divergence (k3){', by the age of the tokens in versions' * (len(curves) > 1)}."
    return Chart("divergence", "Divergence from the rollout policy", lines[:MOST_LINES], "nats a token", note)


def _lengths(metrics: Metrics) -> Chart:
    mean = metrics.series("response_length/mean", "sampler")
    if not len(mean.versions):
        mean = metrics.series("tokens/model_mean", "sampler")
    lines = list(noisy(mean, "mean"))
    longest = finite(metrics.series("response_length/max", "sampler"))
    lines.append(Line("longest", *longest, colour=1))
    return Chart("lengths", "Tokens sampled an episode", [line for line in lines if len(line.versions)], "tokens")


def _cut_off(metrics: Metrics) -> Chart:
    names = {"cut off": "response_length/clip_ratio", "tool calls that failed": "tool_calls/error_ratio"}
    lines = [line for i, (label, name) in enumerate(names.items()) for line in noisy(metrics.series(name), label, i)]
    note = "Episodes that a limit ended, and failed tool calls, as shares of all."
    return Chart("cut-off", "Cut off, and failed calls", lines, note=note, is_share=True)


def _entropy(metrics: Metrics) -> Chart:
    return Chart("entropy", "Entropy of the policy", list(noisy(metrics.series("actor/entropy"), "")), "nats a token")


def _by_step(series: Series) -> Curve:
    """The mean of what was measured at each version."""
    curve = finite(series)
    versions, index = np.unique(curve.versions, return_inverse=True)
    counts = np.maximum(np.bincount(index, minlength=len(versions)), 1)
    return Curve(versions, np.bincount(index, curve.values, minlength=len(versions)) / counts)
