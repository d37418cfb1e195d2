"""The panels about the age of samples, the correction at each age, optimization, and the episodes' lengths and ends."""

from __future__ import annotations

from typing import Any

import numpy as np

from launcher.folder.episodes import SET_ASIDE, EpisodeIndex
from launcher.folder.metrics import Metrics
from launcher.page.charts import NO_BATCH, NO_STEP, Line, bars, lines, newest, noisy, panel, steps, table

AGES = {"age_0": "0", "age_1": "1", "age_2": "2", "age_3_4": "3–4", "age_5_plus": "5 and more"}
BY_AGE = {
    "fraction": "share of tokens", "k3_kl": "KL", "ratio_mean": "mean ratio", "truncated_fraction": "truncated",
    "weight_mean": "mean weight", "masked_fraction": "masked", "eff_sample_size": "effective sample size",
}  # fmt: skip
MOST_REASONS = 50


def staleness_panel(metrics: Metrics) -> dict[str, Any]:
    """Charts of staleness: versions from the oldest token of a sample to the batch that trains on it."""
    ages = {"mean": "mean", "oldest": "max", "in flight, mean": "in_flight_mean", "in queue, mean": "in_queue_mean"}
    of_samples = steps(metrics, {words: f"staleness/{name}" for words, name in ages.items()})
    of_tokens = steps(metrics, {f"age {words}": f"staleness/{age}" for age, words in AGES.items()}, "learner")
    charts = [
        lines("staleness", "Age of samples in their batch", of_samples, "versions"),
        bars("staleness-now", "Ages in the newest batch", metrics.histogram("staleness/total"), "versions"),
        lines("token-ages", "Tokens by age", of_tokens, "share", missing=NO_STEP),
    ]
    return panel("staleness", "Staleness", charts, missing=NO_BATCH)


def correction_panel(metrics: Metrics) -> dict[str, Any]:
    """Charts of the off-policy correction, overall and by the age of the tokens."""

    def by_age(figure: str) -> list[Line]:
        labels = {f"age {words}": f"rollout_corr/{age}/{figure}" for age, words in AGES.items()}
        return steps(metrics, labels, "learner")

    rows = [
        [words, *(newest(metrics, f"rollout_corr/{age}/{figure}", "learner") for figure in BY_AGE)]
        for age, words in AGES.items()
        if metrics.last(f"rollout_corr/{age}/k3_kl", "learner") is not None
    ]
    used = {
        "effective sample size": "rollout_corr/eff_sample_size",
        "tokens masked": "rollout_corr/masked_fraction",
        "sequences masked": "rollout_corr/seq_masked_fraction",
    }
    divergence = [*noisy("all tokens", metrics.series("rollout_corr/k3_kl", "learner")), *by_age("k3_kl")]
    note = "Estimate of the KL divergence (k3), over all tokens and by their age in versions."
    charts = [
        lines("ess", "Effective sample size and masked shares", steps(metrics, used, "learner"), "share"),
        lines("divergence", "Divergence from the rollout policy", divergence, "nats/token", note=note),
        lines("weight-by-age", "Mean weight by age of tokens", by_age("weight_mean")),
        lines("truncated-by-age", "Truncated weights by age of tokens", by_age("truncated_fraction"), "share"),
        table("by-age", "Newest figures of each age", ["age", *BY_AGE.values()], rows),
    ]
    missing = f"{NO_STEP} The correction is measured at each step."
    return panel("correction", "Correction by age", charts, missing=missing)


def optimization_panel(metrics: Metrics) -> dict[str, Any]:
    def of(*names: str) -> list[Line]:
        return steps(metrics, {name: f"actor/{name}" for name in names}, "learner")

    demonstrations = {"trained on": "sft/loss", "held out": "sft/heldout_loss"}
    supervised = lines("sft-loss", "Loss on demonstrations", steps(metrics, demonstrations, "learner"), "nats/token")
    entropy = noisy("entropy", metrics.series("actor/entropy", "learner"))
    charts = [
        *([] if metrics.last("sft/loss") is None else [supervised]),
        lines("loss", "Policy loss", of("pg_loss", "loss")),
        lines("entropy", "Entropy of the policy", entropy, "nats/token"),
        lines("grad-norm", "Gradient norm", of("grad_norm")),
        lines("clipped", "Clipped tokens", of("clip_low", "clip_high"), "share"),
        lines("lr", "Learning rate", of("lr")),
        lines("drift", "Drift of a step", of("drift"), missing="Measured only with `sampler.drift.mode: ledger`."),
    ]
    return panel("optimization", "Optimization", charts, missing=NO_STEP)


def lengths_panel(metrics: Metrics) -> dict[str, Any]:
    """Charts of response lengths, turns and durations, and of the share that a limit cut off."""

    def of(**labels: str) -> list[Line]:
        return steps(metrics, {label.replace("_", " "): name for label, name in labels.items()}, "sampler")

    lengths = of(mean="response_length/mean", longest="response_length/max", mean_with_prompt="tokens/mean")
    calls = of(
        turns="num_turns/mean", tool_calls="tool_calls/mean", rows="num_rows/mean",
        requests="agent/requests", refused_requests="agent/refused",
    )  # fmt: skip
    parts = {name: f"container/{name}_seconds" for name in ("start", "agent", "grading")}
    charts = [
        lines("lengths", "Response length", lengths, "tokens"),
        lines("cut-off", "Cut off by a limit", of(of_episodes="response_length/clip_ratio"), "share"),
        lines("turns", "Turns, tool calls, rows and requests per episode", calls),
        lines(
            "seconds",
            "Seconds per episode",
            of(mean="episode/seconds_mean", longest="episode/seconds_max", **parts),
            "s",
        ),
    ]
    return panel("lengths", "Lengths and cut-offs", charts, missing=NO_BATCH)


def endings_panel(metrics: Metrics, index: EpisodeIndex) -> dict[str, Any]:
    """Charts of how episodes ended and of failed tool calls, and the reasons for skipped tasks."""
    names = metrics.names("sampler")
    endings = {name.removeprefix("ending/"): name for name in names if name.startswith("ending/")}
    kinds = {name.removeprefix("samples/"): name for name in names if name.startswith("samples/set_aside")}
    rows = index.rows()
    counts = np.bincount(rows["reason"][rows["flags"] & SET_ASIDE != 0], minlength=1)
    order = np.argsort(-counts, kind="stable")[:MOST_REASONS]
    reasons = [[index.reasons.all[i], int(counts[i])] for i in order if counts[i]]
    errors = steps(metrics, {"share of calls": "tool_calls/error_ratio"})
    no_tool = "No tool has been called (`episode.tools` names tools)."
    none = "None: every task has been answered."
    none_kept = "There is none among the episodes that the run has kept."
    charts = [
        lines("endings", "How episodes ended", steps(metrics, endings), "share", missing=NO_BATCH),
        lines("tool-errors", "Tool calls that failed", errors, "share", missing=no_tool),
        lines("set-aside", "Skipped tasks, in total", steps(metrics, kinds), missing=none),
        table("reasons", "Reasons for skipped tasks", ("reason", "tasks"), reasons, none_kept),
    ]
    return panel("endings", "Endings, tool errors and skipped tasks", charts)
