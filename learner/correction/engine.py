"""Corrects model tokens, in one loop over the stages of the configuration.

Formulas and their sources: docs/correction.md. Truncated weights are those of IMPALA (arXiv 1802.01561); k1, k2 and k3
are the estimators of Schulman, "Approximating KL divergence".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from common.config import CorrectionConfig
from common.config.stages import LOG_RATIO_BOUND, Mask, SecondMoment, Weight
from learner.batch.layout import Layout
from learner.correction.second_moment import columns, second_moment_mask
from learner.correction.statistics import (
    PREFIX,
    Bound,
    SkyRLStatistics,
    VerlStatistics,
    age_buckets,
    age_statistics,
    divergence_statistics,
    kept_statistics,
    token_divergences,
)
from learner.stats import Stats


@dataclass(frozen=True, slots=True)
class TokenCorrection:
    """Weights and mask of N tokens, for the loss.

    Attributes:
        weights: importance weights, float64 [N]; None if tokens are not weighted.
        keep: tokens that take part in the loss, bool [N].
    """

    weights: torch.Tensor | None
    keep: torch.Tensor


@torch.no_grad()
def correct_tokens(
    old: torch.Tensor,
    rollout: torch.Tensor,
    layout: Layout,
    config: CorrectionConfig,
    stats: Stats,
    ages: torch.Tensor | None = None,
    m2_keep: torch.Tensor | None = None,
) -> TokenCorrection:
    """Weights and mask of model tokens; their statistics go into `stats`.

    Nothing here waits for the device, unless `m2_threshold` is set and `m2_keep` is None. The weights are not divided
    by their mean here, even if the configuration says so, because the mean is over all ranks.

    Args:
        old, rollout: log pi_old and log pi_rollout of each model token [N].
        ages: versions between the token's weights and the batch's, int64 [N]; None omits the statistics by age.
        m2_keep: tokens that `m2_threshold` keeps, bool [N]; None if these tokens are the whole mini-batch.
    """
    as_given = old, rollout
    old, rollout = old.double(), rollout.double()
    finite = old.isfinite() & rollout.isfinite()
    ratio_logs = log_ratios(old, rollout, finite)
    old, rollout = torch.where(finite, old, 0.0), torch.where(finite, rollout, 0.0)
    x = old - rollout
    everything = torch.ones_like(finite)
    # Rules still see a token of probability 0, so that rules for rows drop its row; it is removed from `keep` below.
    weights, truncated, keep = None, torch.zeros_like(finite), finite | ratio_logs.isinf()

    divergences = token_divergences(x)
    divergence_statistics(stats, old, rollout, finite, divergences, layout, config)
    dialect = (SkyRLStatistics if config.skyrl else VerlStatistics)(stats, ratio_logs, layout, config)
    for stage in dict.fromkeys(config.stages()):  # a stage named twice is applied once
        if isinstance(stage, SecondMoment):
            if m2_keep is None:
                m2_keep = second_moment_mask(stage.threshold, columns(*as_given, layout))
            stats.mean(f"{PREFIX}m2", x.square(), over="tokens")
            stats.mean(f"{PREFIX}m2_masked_fraction", ~m2_keep, over="tokens")
            keep = keep & m2_keep
            continue
        seen = keep if stage.sees == "left" else everything
        lower, upper = bounds(stage, ages, layout, config)
        if isinstance(stage, Weight):
            ratio = importance_ratio(ratio_logs, stage, layout, seen)
            truncated, weights = ratio > upper, ratio.clamp(max=upper)
            if stage.zero_outside:
                truncated = truncated | (ratio < lower)
                weights = torch.where(truncated, 0.0, ratio)
            dialect.weight(stage, ratio, weights, lower, upper, seen)
            if stage.of_rows:
                weights, truncated = layout.expand(weights), layout.expand(truncated)
        else:
            values = mask_statistic(ratio_logs, stage, layout, seen)
            inside = (values >= lower) & (values <= upper)
            if stage.level == "any":
                inside = ~layout.segment_any(~inside & seen)
            if stage.level != "token":
                inside = layout.expand(inside)
            dialect.mask(stage, values, lower, upper, inside, seen)
            keep = keep & inside
    dialect.finish()
    keep = keep & finite
    kept_statistics(stats, weights, keep, layout)
    if ages is not None:
        age_statistics(stats, x, divergences, age_buckets(ages), truncated, weights, keep)
    return TokenCorrection(weights, keep)


def log_ratios(old: torch.Tensor, rollout: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """x = log pi_old - log pi_rollout of each token [N]; infinite if one policy gives probability 0, 0 if NaN."""
    x = torch.where(finite, old - rollout, 0.0)
    x = torch.where(rollout.isneginf() & ~old.isnan(), math.inf, x)
    return torch.where(old.isneginf() & ~rollout.isnan(), -math.inf, x)


def importance_ratio(x: torch.Tensor, stage: Weight, layout: Layout, seen: torch.Tensor) -> torch.Tensor:
    """exp(clip(x, +-20)) of each token [N], or exp(clip(sum of x, +-20)) over the seen tokens of each row [B]."""
    if stage.of_rows:
        # The sum is NaN if a row has both infinities: tokens of probability 0 under one policy, others under the other.
        x = layout.segment_sum(torch.where(seen, x, 0.0)).nan_to_num(nan=-LOG_RATIO_BOUND)
    return x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def mask_statistic(x: torch.Tensor, stage: Mask, layout: Layout, seen: torch.Tensor) -> torch.Tensor:
    """The value that the stage bounds: of each token [N], or over each row's seen tokens [B], 0 where it has none."""
    if stage.level == "any":
        return -x
    x = x.clamp(-stage.bound, stage.bound)
    values = {"k1": lambda: -x, "k2": lambda: x.square() / 2, "k3": lambda: x.expm1() - x}[stage.estimator]()
    if stage.level == "token":
        return values
    if stage.level == "mean":
        return layout.mean_where(values, seen)
    values = torch.where(seen, values, 0.0)
    return layout.segment_sum(values) if stage.level == "sum" else layout.segment_max(values).clamp(min=0)


def bounds(
    stage: Weight | Mask, ages: torch.Tensor | None, layout: Layout, config: CorrectionConfig
) -> tuple[Bound, Bound]:
    """The stage's bounds; with `thresholds_by_age` those at the age of each token [N], or of each row's oldest [B]."""
    if config.thresholds_by_age is None or ages is None or not stage.by_age:
        return stage.lower, stage.upper
    if stage.of_rows:
        ages = layout.segment_max(ages).clamp(min=0)
    factors = torch.tensor(config.thresholds_by_age, dtype=torch.float64, device=ages.device)[age_buckets(ages)]
    if isinstance(stage, Weight):
        return stage.lower**factors, stage.upper**factors
    return stage.lower * factors, stage.upper * factors
