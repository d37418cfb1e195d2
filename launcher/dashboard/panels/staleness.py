"""How old samples are when they are trained on, and what the correction does at each age."""

from __future__ import annotations

from typing import Any

from launcher.dashboard.charts import bars, line, lines, number, panel, table
from launcher.folder.metrics import Metrics

AGES = {"age_0": "0", "age_1": "1", "age_2": "2", "age_3_4": "3–4", "age_5_plus": "5 and more"}
BY_AGE = {
    "fraction": "share of tokens", "kl": "KL", "ratio_mean": "mean ratio", "truncated_fraction": "truncated",
    "weight_mean": "mean weight", "masked_fraction": "masked", "eff_sample_size": "effective sample size",
}  # fmt: skip
NO_STEP = "The learner has made no step yet."
NO_BATCH = "No batch has been closed yet."


def staleness_panel(metrics: Metrics) -> dict[str, Any]:
    """Versions between the oldest token of a sample and the batch that trains on it."""
    histograms = metrics.histograms("staleness/total")
    charts = [
        lines(
            "staleness", "Age of samples in their batch",
            [
                line("mean", metrics.series("staleness/mean")),
                line("oldest", metrics.series("staleness/max")),
                line("in flight, mean", metrics.series("staleness/in_flight_mean")),
                line("in queue, mean", metrics.series("staleness/in_queue_mean")),
            ],
            NO_BATCH, "versions",
        ),
        bars("staleness-now", "Ages in the newest batch", histograms[-1] if histograms else None, NO_BATCH, "versions"),
        lines(
            "token-ages", "Tokens by age",
            [line(f"age {words}", metrics.series(f"staleness/{age}", "learner")) for age, words in AGES.items()],
            NO_STEP, "share",
        ),
    ]  # fmt: skip
    return panel("staleness", "Staleness", charts)


def correction_panel(metrics: Metrics) -> dict[str, Any]:
    """The off-policy correction, in all and by the age of the tokens."""

    def of(name: str) -> Any:
        return metrics.series(f"rollout_corr/{name}", "learner")

    def by_age(figure: str) -> list[dict[str, Any]]:
        return [line(f"age {words}", of(f"{age}/{figure}")) for age, words in AGES.items()]

    rows = [
        [AGES[age], *(number(values[-1]) if len(values := of(f"{age}/{figure}").values) else None for figure in BY_AGE)]
        for age in AGES
        if len(of(f"{age}/kl").values)
    ]
    missing = f"{NO_STEP} The correction is measured with each one."
    charts = [
        lines(
            "ess", "Effective sample size, and what is masked",
            [
                line("effective sample size", of("eff_sample_size")),
                line("tokens masked", of("masked_fraction")),
                line("sequences masked", of("seq_masked_fraction")),
            ],
            missing, "share",
        ),
        lines("kl-by-age", "KL of rollout and proximal policy, by age of tokens", by_age("kl"), missing),
        lines("weight-by-age", "Mean weight by age of tokens", by_age("weight_mean"), missing),
        lines("truncated-by-age", "Truncated weights by age of tokens", by_age("truncated_fraction"), missing, "share"),
        table("by-age", "When tokens of each age were last seen", ["age", *BY_AGE.values()], rows, missing),
    ]  # fmt: skip
    return panel("correction", "Correction by age", charts)


def optimization_panel(metrics: Metrics) -> dict[str, Any]:
    """The learner's step."""

    def of(*names: str) -> list[dict[str, Any]]:
        return [line(name.removeprefix("actor/"), metrics.series(name, "learner")) for name in names]

    charts = [
        lines("loss", "Policy loss", of("actor/pg_loss", "actor/loss"), NO_STEP),
        lines("entropy", "Entropy of the policy", of("actor/entropy"), NO_STEP),
        lines("grad-norm", "Gradient norm", of("actor/grad_norm"), NO_STEP),
        lines("clipped", "Clipped tokens", of("actor/clip_low", "actor/clip_high"), NO_STEP, "share"),
        lines("lr", "Learning rate", of("actor/lr"), NO_STEP),
        lines("drift", "Drift of a step", of("actor/drift"), "Measured only with `sampler.drift.mode: ledger`."),
    ]
    return panel("optimization", "Optimization", charts)
