"""How far apart the proximal and the generating policy are, over all tokens and by the tokens' age."""

from __future__ import annotations

import math

import torch

from common.config import AGE_BUCKETS
from learner.correction.ages import sum_by_bucket
from learner.correction.layout import Layout
from learner.correction.tally import Tally
from learner.correction.weights import LOG_RATIO_BOUND

# Exponents of what is reported only; e^80 still fits into the float32 of a dashboard.
EXP_BOUND = 80.0
BY_AGE = ("tokens", "kl", "k3_kl", "chi2_token", "ratio", "truncated", "weight", "weight2", "rejected")


def count_divergences(
    tally: Tally,
    old: torch.Tensor,
    rollout: torch.Tensor,
    x: torch.Tensor,
    layout: Layout,
    lengths: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Sums of divergences and perplexities.

    Args:
        old, rollout: log-probs of each token [N].
        x: their difference [N].
        lengths: tokens of each row [B].
        rows: rows that take part, bool [B]; an empty one with log-perplexity 0.
    """
    per_row = lengths.clamp(min=1)
    log_ppl, rollout_log_ppl = -layout.segment_sum(old) / per_row, -layout.segment_sum(rollout) / per_row
    gap = layout.segment_sum(-x) / per_row
    square = (2 * layout.segment_sum(x).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).exp()
    tally.add(kl=-x, k3_kl=_exp(x) - 1 - x, chi2_token=(2 * x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).expm1())
    tally.add(
        training_log_ppl=torch.where(rows, log_ppl, 0.0),
        training_ppl=torch.where(rows, _exp(log_ppl), 0.0),
        rollout_log_ppl=torch.where(rows, rollout_log_ppl, 0.0),
        rollout_ppl=torch.where(rows, _exp(rollout_log_ppl), 0.0),
        log_ppl_diff=torch.where(rows, gap, 0.0),
        log_ppl_abs_diff=torch.where(rows, gap.abs(), 0.0),
        ppl_ratio=torch.where(rows, _exp(gap), 0.0),
        chi2_seq=torch.where(rows, square - 1, 0.0),
    )
    bottom = -torch.inf
    tally.peak(log_ppl_diff_max=torch.where(rows, gap, bottom), log_ppl_diff_min=torch.where(rows, -gap, bottom))


def divergence_metrics(sums: dict[str, float], peaks: dict[str, float], tokens: float, rows: float) -> dict[str, float]:
    """`kl`, `k3_kl`, perplexities, `chi2_*`; {} without tokens."""
    if tokens == 0:
        return {}
    found = {name: sums[name] / tokens for name in ("kl", "k3_kl", "chi2_token")}
    of_rows = ("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "log_ppl_diff", "log_ppl_abs_diff")
    found |= {name: sums[name] / rows for name in (*of_rows, "ppl_ratio", "chi2_seq")}
    return found | {"log_ppl_diff_max": peaks["log_ppl_diff_max"], "log_ppl_diff_min": -peaks["log_ppl_diff_min"]}


def count_by_age(
    tally: Tally,
    x: torch.Tensor,
    bucket: torch.Tensor,
    truncated: torch.Tensor,
    weights: torch.Tensor | None,
    keep: torch.Tensor,
) -> None:
    """The same by staleness, token by token, and where the correction begins to bite.

    Args:
        bucket: staleness bucket of each token [N].
        truncated: tokens whose weight was cut off at the threshold, bool [N].
        weights: the weights in use [N], or None.
        keep: tokens that are not rejected, bool [N].
    """
    bounded = x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    used = torch.ones_like(x) if weights is None else weights
    columns = (
        torch.ones_like(x),
        -x,
        _exp(x) - 1 - x,
        (2 * bounded).expm1(),
        bounded.exp(),
        truncated,
        used,
        used.square(),
        ~keep,
    )
    sums = sum_by_bucket(torch.stack([column.double() for column in columns], 1), bucket)
    tally.add_table("by_age", sums)


def age_metrics(table: list[list[float]]) -> dict[str, float]:
    """`age_<bucket>/...` of every bucket that has tokens: means over its tokens, and its share of all tokens."""
    total = sum(row[0] for row in table)
    found = {}
    for name, row in zip(AGE_BUCKETS, table, strict=True):
        values = dict(zip(BY_AGE, row, strict=True))
        tokens = values.pop("tokens")
        if tokens == 0:
            continue
        means = {key: value / tokens for key, value in values.items()}
        found[f"{name}/fraction"] = tokens / total
        found |= {f"{name}/{key}": means[key] for key in ("kl", "k3_kl", "chi2_token")}
        found[f"{name}/ratio_mean"] = means["ratio"]
        found[f"{name}/truncated_fraction"] = means["truncated"]
        found[f"{name}/weight_mean"] = means["weight"]
        square = means["weight2"]
        found[f"{name}/eff_sample_size"] = means["weight"] ** 2 / square if square > 0 else 0.0
        found[f"{name}/masked_fraction"] = means["rejected"]
    return {key: value for key, value in found.items() if math.isfinite(value)}


def _exp(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(max=EXP_BOUND).exp()
