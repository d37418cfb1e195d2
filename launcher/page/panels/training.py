"""The age of samples, what the correction does at each age, the learner's step, and what episodes were like."""

from __future__ import annotations

from typing import Any

import numpy as np

from launcher.folder.episodes import SET_ASIDE, EpisodeIndex
from launcher.folder.metrics import Metrics
from launcher.page.charts import Line, bars, lines, noisy, number, panel, steps, table

AGES = {"age_0": "0", "age_1": "1", "age_2": "2", "age_3_4": "3–4", "age_5_plus": "5 and more"}
BY_AGE = {
    "fraction": "share of tokens", "k3_kl": "KL", "ratio_mean": "mean ratio", "truncated_fraction": "truncated",
    "weight_mean": "mean weight", "masked_fraction": "masked", "eff_sample_size": "effective sample size",
}  # fmt: skip
NO_STEP = "The learner has made no step yet."
NO_BATCH = "No batch has been closed yet."
MOST_REASONS = 50


def staleness_panel(metrics: Metrics) -> dict[str, Any]:
    """Versions between the oldest token of a sample and the batch that trains on it."""
    ages = {"mean": "mean", "oldest": "max", "in flight, mean": "in_flight_mean", "in queue, mean": "in_queue_mean"}
    charts = [
        lines(
            "staleness", "Age of samples in their batch",
            steps(metrics, {words: f"staleness/{name}" for words, name in ages.items()}), NO_BATCH, "versions",
        ),
        bars("staleness-now", "Ages in the newest batch", metrics.histogram("staleness/total"), NO_BATCH, "versions"),
        lines(
            "token-ages", "Tokens by age",
            steps(metrics, {f"age {words}": f"staleness/{age}" for age, words in AGES.items()}, "learner"),
            NO_STEP, "share",
        ),
    ]  # fmt: skip
    return panel("staleness", "Staleness", charts)


def correction_panel(metrics: Metrics) -> dict[str, Any]:
    """The off-policy correction, in all and by the age of the tokens."""

    def by_age(figure: str) -> list[Line]:
        return steps(
            metrics, {f"age {words}": f"rollout_corr/{age}/{figure}" for age, words in AGES.items()}, "learner"
        )

    def newest(age: str, figure: str) -> float | int | None:
        value = metrics.last(f"rollout_corr/{age}/{figure}", "learner")
        return None if value is None else number(value)

    rows = [
        [words, *(newest(age, figure) for figure in BY_AGE)]
        for age, words in AGES.items()
        if metrics.last(f"rollout_corr/{age}/k3_kl", "learner") is not None
    ]
    missing = f"{NO_STEP} The correction is measured with each one."
    divergence = noisy("all tokens", metrics.series("rollout_corr/k3_kl", "learner"))
    charts = [
        lines(
            "ess", "Effective sample size, and what is masked",
            steps(metrics, {"effective sample size": "rollout_corr/eff_sample_size",
                            "tokens masked": "rollout_corr/masked_fraction",
                            "sequences masked": "rollout_corr/seq_masked_fraction"}, "learner"),
            missing, "share",
        ),
        lines(
            "divergence", "Divergence from the rollout policy", [*divergence, *by_age("k3_kl")], missing,
            "nats a token",
            note="Estimate of the KL divergence (k3), of all tokens and by their age in versions.",
        ),
        lines("weight-by-age", "Mean weight by age of tokens", by_age("weight_mean"), missing),
        lines("truncated-by-age", "Truncated weights by age of tokens", by_age("truncated_fraction"), missing, "share"),
        table("by-age", "When tokens of each age were last seen", ["age", *BY_AGE.values()], rows, missing),
    ]  # fmt: skip
    return panel("correction", "Correction by age", charts)


def optimization_panel(metrics: Metrics) -> dict[str, Any]:
    """The learner's step."""

    def of(*names: str) -> list[Line]:
        return steps(metrics, {name: f"actor/{name}" for name in names}, "learner")

    charts = [
        lines("loss", "Policy loss", of("pg_loss", "loss"), NO_STEP),
        lines("entropy", "Entropy of the policy", noisy("entropy", metrics.series("actor/entropy", "learner")), NO_STEP,
              "nats a token"),
        lines("grad-norm", "Gradient norm", of("grad_norm"), NO_STEP),
        lines("clipped", "Clipped tokens", of("clip_low", "clip_high"), NO_STEP, "share"),
        lines("lr", "Learning rate", of("lr"), NO_STEP),
        lines("drift", "Drift of a step", of("drift"), "Measured only with `sampler.drift.mode: ledger`."),
    ]  # fmt: skip
    return panel("optimization", "Optimization", charts)


def lengths_panel(metrics: Metrics) -> dict[str, Any]:
    """Tokens of responses, and the share that a limit has cut off."""

    def of(labels: dict[str, str]) -> list[dict[str, Any]]:
        return steps(metrics, labels, "sampler")

    lengths = {"mean": "response_length/mean", "longest": "response_length/max", "mean with prompt": "tokens/mean"}
    charts = [
        lines("lengths", "Response length", of(lengths), NO_BATCH, "tokens"),
        lines("cut-off", "Cut off by a limit", of({"of episodes": "response_length/clip_ratio"}), NO_BATCH, "share"),
        lines(
            "turns", "Turns and tool calls an episode",
            of({"turns": "num_turns/mean", "tool calls": "tool_calls/mean"}), NO_BATCH,
        ),
        lines(
            "seconds", "Seconds an episode", of({"mean": "episode/seconds_mean", "longest": "episode/seconds_max"}),
            NO_BATCH, "s",
        ),
    ]  # fmt: skip
    return panel("lengths", "Lengths and cut-offs", charts)


def endings_panel(metrics: Metrics, index: EpisodeIndex) -> dict[str, Any]:
    """Why episodes ended; failing tool calls; skipped tasks with their reasons."""
    names = metrics.names("sampler")
    endings = {name.removeprefix("ending/"): name for name in names if name.startswith("ending/")}
    kinds = {name.removeprefix("samples/"): name for name in names if name.startswith("samples/set_aside")}
    rows = index.rows()
    counts = np.bincount(rows["reason"][rows["flags"] & SET_ASIDE != 0], minlength=1)
    order = np.argsort(-counts, kind="stable")[:MOST_REASONS]
    reasons = [[index.reasons.all[i], int(counts[i])] for i in order if counts[i]]
    charts = [
        lines("endings", "How episodes ended", steps(metrics, endings), NO_BATCH, "share"),
        lines(
            "tool-errors", "Tool calls that failed", steps(metrics, {"share of calls": "tool_calls/error_ratio"}),
            "No tool has been called (`episode.tools` names tools).", "share",
        ),
        lines("set-aside", "Skipped tasks, in all", steps(metrics, kinds), "None: every task has been answered."),
        table("reasons", "Reasons for which tasks were skipped", ("reason", "tasks"), reasons,
              "None is among the episodes that are kept (`episode.rollouts_every` above 0 keeps them)."),
    ]  # fmt: skip
    return panel("endings", "Endings, tool errors and skipped tasks", charts)
