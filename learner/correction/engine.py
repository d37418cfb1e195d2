"""The correction of some model tokens: weights, mask and statistics, by verl's fields or by SkyRL's stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.config import CorrectionConfig, Rule, SkyRLCorrection
from common.config.correction import ratio_band
from learner.correction.ages import age_factors, buckets
from learner.correction.diagnostics import count_by_age, count_divergences
from learner.correction.family import Family
from learner.correction.layout import Layout
from learner.correction.rejection import bounds, kept, statistic
from learner.correction.tally import Tally
from learner.correction.weights import ratios, truncation

Factors = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class TokenCorrection:
    """What the loss needs of the correction of N tokens.

    Attributes:
        weights: importance weights, float64 [N]; None: no weighting.
        keep: tokens that take part in the loss, bool [N].
        tally: statistics, still to be summed over micro-batches and ranks.
    """

    weights: torch.Tensor | None
    keep: torch.Tensor
    tally: Tally


@dataclass(frozen=True, slots=True)
class Gap:
    """The tokens at hand.

    Attributes:
        x: log pi_old - log pi_rollout, float64 [N]; zero where either is not finite.
        finite: where both are, bool [N].
        layout: rows of the tokens.
        full: rows with model tokens, bool [B].
        factors: of thresholds that depend on age, for tokens and for rows.
    """

    x: torch.Tensor
    finite: torch.Tensor
    layout: Layout
    full: torch.Tensor
    factors: Factors


@torch.no_grad()
def correct_tokens(
    old: torch.Tensor,
    rollout: torch.Tensor,
    layout: Layout,
    config: CorrectionConfig,
    ages: torch.Tensor | None = None,
) -> TokenCorrection:
    """Weights, mask and statistics of some tokens. Nothing waits for the device here.

    Weights are not divided by their mean yet where the configuration wants that: it takes all ranks.

    Args:
        old: log pi_old of each model token [N].
        rollout: log pi_rollout of each model token [N].
        ages: versions between the token's weights and the batch's, int64 [N]; None: no statistics by age.
    """
    old, rollout = old.double(), rollout.double()
    finite = old.isfinite() & rollout.isfinite()
    old, rollout = torch.where(finite, old, 0.0), torch.where(finite, rollout, 0.0)
    lengths = layout.segment_sum(torch.ones_like(old))
    gap = Gap(old - rollout, finite, layout, lengths > 0, age_factors(ages, layout, config))
    tally = Tally()
    rows = torch.ones_like(gap.full) if config.compatible_metrics else gap.full
    tally.add(tokens=torch.ones_like(old), rows=gap.full, all_rows=rows, nonfinite=~finite)
    count_divergences(tally, old, rollout, gap.x, layout, lengths, rows)
    if config.skyrl is not None:
        weights, truncated, keep = _skyrl(gap, config.skyrl, config, tally)
    else:
        weights, truncated, keep = _verl(gap, config, tally)
    _count_kept(tally, weights, keep, layout, lengths)
    if ages is not None:
        count_by_age(tally, gap.x, buckets(ages), truncated, weights, keep)
    return TokenCorrection(weights, keep, tally)


def _verl(gap: Gap, config: CorrectionConfig, tally: Tally) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Weights, truncated tokens and mask. Every rule sees all tokens; a token stays if all rules keep it."""
    layout, keep = gap.layout, gap.finite
    weights, truncated = None, torch.zeros_like(gap.finite)
    everything = torch.ones_like(gap.finite)
    if config.rollout_is is not None:
        of_rows = config.rollout_is == "sequence"
        limit = truncation(config.rollout_is_threshold, gap.factors[of_rows])
        ratio = ratios(gap.x, layout, config.rollout_is)
        Family("rollout_is", 1.0, of_rows).count(
            tally, ratio, 1 / limit, limit, layout, gap.full, config.compatible_metrics
        )
        weights, over = ratio.clamp(max=limit), ratio > limit
        tally.add(weight_sum=torch.where(gap.full, weights, 0.0) if of_rows else weights)
        tally.add(weight_count=gap.full if of_rows else everything)
        if of_rows:
            weights, over = layout.expand(weights), layout.expand(over)
        truncated = over
    if config.rollout_token_veto_threshold is not None:
        veto = ratio_band("veto", "any", config.rollout_token_veto_threshold, None)
        values = statistic(gap.x, veto, layout, everything)
        spared = kept(values, veto, veto.lower, veto.upper, layout, everything)
        tally.add(veto_rows=_rows_with(~spared, layout), veto_tokens=values > veto.upper)
        keep = keep & spared
    passed = everything
    for rule in config.rules():
        values = statistic(gap.x, rule, layout, everything)
        low, high = bounds(rule, gap.factors)
        inside = kept(values, rule, low, high, layout, everything)
        Family(f"rollout_rs_{rule.name}", 0.0, rule.level != "token").count(tally, values, low, high, layout, gap.full)
        with tally.under(f"rollout_rs_{rule.name}_"):
            tally.add(masked=~inside, seq_masked=_rows_with(~inside, layout))
        passed = passed & inside
    if config.rollout_rs is not None:
        tally.add(rs_masked=~passed, rs_seq_masked=_rows_with(~passed, layout))
    return weights, truncated, keep & passed


def _skyrl(
    gap: Gap, config: SkyRLCorrection, whole: CorrectionConfig, tally: Tally
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Weights, truncated tokens and mask, stage after stage, each on the mask so far."""
    layout, keep = gap.layout, gap.finite
    ratio = gap.x.exp().clamp(max=1e30)
    tally.add(is_ratio=ratio, is_ratio2=ratio.square())
    tally.peak(is_ratio_max=ratio, is_ratio_min=-ratio)
    padding = layout.cells - len(ratio)
    if whole.compatible_metrics and padding:
        tally.peak(is_ratio_min=ratio.new_zeros(1))
    tally.add(cells=ratio.new_tensor(float(layout.cells if whole.compatible_metrics else len(ratio))))
    for rule in config.before_weights():
        keep = keep & _skyrl_stage(gap, rule, keep, tally)
    weights, truncated = None, torch.zeros_like(keep)
    if config.tis_ratio_type is not None:
        of_rows = config.tis_ratio_type == "sequence"
        cap = config.sequence_tis_ratio_clip_high if of_rows else config.token_tis_ratio_clip_high
        limit = truncation(cap, gap.factors[of_rows])
        # Products are of the tokens that are left; a token's own weight does not depend on the mask.
        ratio = ratios(torch.where(keep, gap.x, 0.0) if of_rows else gap.x, layout, config.tis_ratio_type)
        over = ratio > limit
        tally.add(tis_clipped=over & gap.full if of_rows else over & keep, tis_tokens=keep)
        weights = ratio.clamp(max=limit)
        if of_rows:
            weights, over = layout.expand(weights), layout.expand(over)
        truncated = over
    for rule in config.after_weights():
        keep = keep & _skyrl_stage(gap, rule, keep, tally)
    return weights, truncated, keep


def _skyrl_stage(gap: Gap, rule: Rule, keep: torch.Tensor, tally: Tally) -> torch.Tensor:
    """One rule on the mask so far; counts what it drops, and on which side."""
    values = statistic(gap.x, rule, gap.layout, keep)
    low, high = bounds(rule, gap.factors)
    inside = kept(values, rule, low, high, gap.layout, keep)
    if rule.level == "token":
        tally.add(token_mask=~inside & keep, token_mask_of=keep)
        return inside
    # The statistic is the log of the inverse ratio: low means a high ratio.
    over, under = values < low, values > high
    if rule.level == "any":
        over, under = (_rows_with(side & keep, gap.layout) for side in (over, under))
    with tally.under(f"{rule.name}_"):
        tally.add(masked=_rows_with(~inside & keep, gap.layout), over_high=over & gap.full, under_low=under & gap.full)
    return inside


def _count_kept(
    tally: Tally, weights: torch.Tensor | None, keep: torch.Tensor, layout: Layout, lengths: torch.Tensor
) -> None:
    """What is left to learn from, and how evenly the weights spread it: weights of rows are means over their tokens."""
    tally.add(kept_tokens=keep, kept_rows=_rows_with(keep, layout))
    used = keep.double() if weights is None else torch.where(keep, weights, 0.0)
    by_row = layout.segment_sum(used) / lengths.clamp(min=1)
    tally.add(row_weight=by_row, row_weight2=by_row.square())


def _rows_with(tokens: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Rows with any of these tokens, bool [B]."""
    return layout.segment_sum(tokens.long()) > 0
