"""Statistics of the correction: how far apart the policies are, and what each stage did about it.

The metrics `rollout_corr/...` have verl's names or, with `algorithm.correction.skyrl`, SkyRL's; docs/correction.md
explains them.
"""

from __future__ import annotations

import functools

import torch

from common.config import CorrectionConfig
from common.config.stages import LOG_RATIO_BOUND, Mask, Weight
from learner.batch.layout import Layout
from learner.stats import Stats

PREFIX = "rollout_corr/"
# Bound of exponents in values that are only reported; e^80 still fits into the float32 of a dashboard.
EXP_BOUND = 80.0
# Last age of each of `AGE_BUCKETS` but the open one at the end.
LAST_AGES = (0, 1, 2, 4)
Bound = torch.Tensor | float


def age_buckets(ages: torch.Tensor) -> torch.Tensor:
    """The bucket of each age, int64 like `ages`: 0, 1, 2, 3-4, 5+ versions; below zero counts as 0."""
    return torch.bucketize(ages, _last_ages(ages.device))


@functools.cache
def _last_ages(device: torch.device) -> torch.Tensor:
    return torch.tensor(LAST_AGES, device=device)


def token_divergences(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """How far apart the policies are at each token [N], by metric."""
    return {"kl": -x, "k3_kl": _bounded_exp(x) - 1 - x, "chi2_token": (2 * _clipped(x)).expm1()}


def rows_in_means(config: CorrectionConfig) -> str:
    """Name of the total that sums over rows are divided by: rows with tokens, or all rows as in verl and SkyRL."""
    return "all_rows" if config.compatible_metrics else "rows"


def divergence_statistics(
    stats: Stats,
    old: torch.Tensor,
    rollout: torch.Tensor,
    finite: torch.Tensor,
    divergences: dict[str, torch.Tensor],
    layout: Layout,
    config: CorrectionConfig,
) -> None:
    """Totals of tokens and rows; divergences and perplexities of the two policies.

    Args:
        old, rollout: log-probs of each token [N], zero where not `finite`, bool [N].
    """
    # Rows without model tokens take no part in any mean, unless the figures must equal those of verl and SkyRL.
    rows = torch.ones_like(layout.has_tokens) if config.compatible_metrics else layout.has_tokens
    stats.total("tokens", old.new_full((), len(old)))
    stats.total("rows", layout.has_tokens)
    if config.compatible_metrics:
        stats.total(rows_in_means(config), rows)
    stats.mean(f"{PREFIX}nonfinite_fraction", ~finite, over="tokens")

    stats.means({f"{PREFIX}{name}": values for name, values in divergences.items()}, over="tokens")
    old_sum, rollout_sum = layout.segment_sum(old), layout.segment_sum(rollout)
    log_ppl, rollout_log_ppl = -old_sum / layout.divisors, -rollout_sum / layout.divisors
    gap = log_ppl - rollout_log_ppl
    of_rows = {
        "training_log_ppl": log_ppl,
        "training_ppl": _bounded_exp(log_ppl),
        "rollout_log_ppl": rollout_log_ppl,
        "rollout_ppl": _bounded_exp(rollout_log_ppl),
        "log_ppl_diff": gap,
        "log_ppl_abs_diff": gap.abs(),
        "ppl_ratio": _bounded_exp(gap),
        "chi2_seq": (2 * _clipped(old_sum - rollout_sum)).exp() - 1,
    }
    by_name = {f"{PREFIX}{name}": values for name, values in of_rows.items()}
    stats.means(by_name, over=rows_in_means(config), where=rows)
    stats.extremes({f"{PREFIX}log_ppl_diff_max": gap}, {f"{PREFIX}log_ppl_diff_min": gap}, where=rows)


class VerlStatistics:
    """The statistics that verl reports of its weights and of each of its rejection rules."""

    def __init__(self, stats: Stats, x: torch.Tensor, layout: Layout, config: CorrectionConfig) -> None:
        self._stats, self._layout, self._config = stats, layout, config
        self._passed = torch.ones_like(x, dtype=torch.bool)

    def weight(
        self, stage: Weight, ratio: torch.Tensor, weights: torch.Tensor, lower: Bound, upper: Bound, seen: torch.Tensor
    ) -> None:
        """Report the importance weights, of tokens [N] or rows [B]: before (`ratio`) and after truncation."""
        stats, layout = self._stats, self._layout
        name = f"{PREFIX}rollout_is"
        compatible, reports_applied = bool(self._config.compatible_metrics), self._config.reports_applied
        shown = weights if reports_applied else None
        ratio_statistics(
            stats, name, ratio, lower, upper, 1.0, stage.of_rows, layout, all_rows=compatible, applied=shown
        )
        # verl used to raise small weights to 1 / C here, which makes the figure look better than it is.
        is_raised = compatible and not reports_applied
        applied = ratio.clamp(min=lower).clamp(max=upper) if is_raised else weights
        applied = layout.expand(applied) if stage.of_rows else applied
        stats.effective_sample_size(f"{name}_eff_sample_size", applied, over="tokens")
        if stage.zero_outside:
            outside = (ratio < lower) | (ratio > upper)
            stats.mean(f"{name}_oob_ratio", layout.expand(outside) if stage.of_rows else outside, over="tokens")
        if self._config.rollout_is_batch_normalize and stage.of_rows:
            stats.mean(f"{name}_batch_norm_factor", torch.where(layout.has_tokens, weights, 0.0), over="rows")
        elif self._config.rollout_is_batch_normalize:
            stats.mean(f"{name}_batch_norm_factor", weights, over="tokens")

    def mask(
        self, stage: Mask, values: torch.Tensor, lower: Bound, upper: Bound, inside: torch.Tensor, seen: torch.Tensor
    ) -> None:
        """Report a rule, or the veto: the `values` [N] or [B] that it bounds, and the tokens that it keeps [N]."""
        stats, layout = self._stats, self._layout
        rows_hit = layout.segment_any(~inside)
        if stage.name == "veto":
            stats.mean(f"{PREFIX}rollout_is_veto_fraction", rows_hit, over=rows_in_means(self._config))
            stats.mean(f"{PREFIX}rollout_is_catastrophic_token_fraction", values > upper, over="tokens")
            return
        name = f"{PREFIX}rollout_rs_{stage.name}"
        ratio_statistics(stats, name, values, lower, upper, 0.0, stage.of_rows, layout, stage.estimator == "k1")
        stats.mean(f"{name}_masked_fraction", ~inside, over="tokens")
        stats.mean(f"{name}_seq_masked_fraction", rows_hit, over="rows")
        self._passed = self._passed & inside

    def finish(self) -> None:
        """Report all rules together, without the veto."""
        if self._config.rollout_rs is not None:
            rows_hit = self._layout.segment_any(~self._passed)
            self._stats.mean(f"{PREFIX}rollout_rs_masked_fraction", ~self._passed, over="tokens")
            self._stats.mean(f"{PREFIX}rollout_rs_seq_masked_fraction", rows_hit, over=rows_in_means(self._config))


class SkyRLStatistics:
    """The statistics that SkyRL reports of the ratios and of each stage of its `off_policy_correction`."""

    def __init__(self, stats: Stats, x: torch.Tensor, layout: Layout, config: CorrectionConfig) -> None:
        self._stats, self._layout, self._rows = stats, layout, rows_in_means(config)
        ratio = _clipped(x).exp() if config.compatible_metrics else x.exp().clamp(max=1e30)
        # SkyRL's masked matrix holds zeros in places without a token.
        cells = layout.cells if config.compatible_metrics else len(ratio)
        stats.total("cells", ratio.new_tensor(float(cells)))
        stats.mean(f"{PREFIX}is_ratio_mean", ratio, over="tokens")
        stats.std(f"{PREFIX}is_ratio_std", ratio, over="cells", sample=True)
        in_cells = torch.cat([ratio, ratio.new_zeros(1)]) if cells > len(ratio) else ratio
        stats.extremes({f"{PREFIX}is_ratio_max": ratio}, {})
        stats.extremes({}, {f"{PREFIX}is_ratio_min": in_cells})

    def weight(
        self, stage: Weight, ratio: torch.Tensor, weights: torch.Tensor, lower: Bound, upper: Bound, seen: torch.Tensor
    ) -> None:
        over = ratio > upper
        if stage.of_rows:
            clipped = over & self._layout.has_tokens
            self._stats.mean(f"{PREFIX}tis_seq_clip_high_ratio", clipped, over=self._rows)
        else:
            self._stats.total("tis_tokens", seen)
            self._stats.mean(f"{PREFIX}tis_token_clip_high_ratio", over & seen, over="tis_tokens")

    def mask(
        self, stage: Mask, values: torch.Tensor, lower: Bound, upper: Bound, inside: torch.Tensor, seen: torch.Tensor
    ) -> None:
        """Report which of the tokens seen, bool [N], one stage drops, and on which side."""
        stats, layout = self._stats, self._layout
        dropped = ~inside & seen
        if stage.level == "token":
            stats.total("token_mask_tokens", seen)
            stats.mean(f"{PREFIX}token_mask_ratio", dropped, over="token_mask_tokens")
            return
        # The statistic is the log of the inverse ratio: low means a high ratio.
        high, low = values < lower, values > upper
        if stage.level == "any":
            high, low = (layout.segment_any(side & seen) for side in (high, low))
        stats.mean(f"{PREFIX}{stage.name}_masked_ratio", layout.segment_any(dropped), over=self._rows)
        stats.mean(f"{PREFIX}{stage.name}_over_high_ratio", high & layout.has_tokens, over=self._rows)
        stats.mean(f"{PREFIX}{stage.name}_under_low_ratio", low & layout.has_tokens, over=self._rows)

    def finish(self) -> None:
        pass


def ratio_statistics(
    stats: Stats,
    name: str,
    values: torch.Tensor,
    lower: Bound,
    upper: Bound,
    neutral: float,
    of_rows: bool,
    layout: Layout,
    two_sided: bool = True,
    all_rows: bool = False,
    applied: torch.Tensor | None = None,
) -> None:
    """Report one bounded quantity, by verl's definitions.

    Mean, max and min are those of its values, over tokens; std is that of its values clamped to the bounds; fractions
    beyond the bounds are over tokens, or over rows if the quantity belongs to rows; `seq_*` are those of row means.

    Args:
        values: of each token [N], or of each row [B] if `of_rows`.
        lower, upper: bounds, shaped like `values` or plain numbers.
        neutral: the quantity's value if both policies are equal.
        all_rows: include empty rows, with a row mean of zero.
        applied: values after truncation, shaped like `values`. If given, they and not `values` are used for the mean,
            the std, `seq_*` except its fractions and, unless both `of_rows` and `all_rows`, the extremes.
    """
    bounded = values.clamp(min=lower).clamp(max=upper) if applied is None else applied
    shown = values if applied is None else applied

    def of_tokens(quantity: torch.Tensor) -> torch.Tensor:
        return layout.expand(quantity) if of_rows else quantity

    rows, total = layout.has_tokens, "rows"
    if all_rows:
        rows, total = torch.ones_like(rows), "all_rows"
    tokens = of_tokens(shown)
    stats.mean(f"{name}_mean", tokens, over="tokens", around=neutral)
    # verl takes the extremes over rows, before truncation; an empty row has the neutral value.
    extremes = values if of_rows and all_rows else tokens
    stats.extremes({f"{name}_max": extremes}, {f"{name}_min": extremes})
    stats.std(f"{name}_std", of_tokens(bounded), over="tokens", around=neutral)
    # verl gives the fractions of its weights another name.
    fraction = f"{name}_ratio_fraction" if name.endswith("rollout_is") else f"{name}_fraction"
    beyond = {f"{fraction}_high": values > upper, f"{fraction}_low": values < lower}
    stats.means(beyond, over=total if of_rows else "tokens", where=rows if of_rows else None)
    means = layout.segment_mean(tokens)
    centred = torch.where(rows, means, neutral)
    lowest, highest = (lower, upper) if of_rows else _strictest(lower, upper, layout)
    stats.mean(f"{name}_seq_mean", centred, over=total, around=neutral)
    stats.std(f"{name}_seq_std", centred, over=total, around=neutral, sample=True)
    largest = {f"{name}_seq_max": means, f"{name}_seq_max_deviation": (means - neutral).abs()}
    stats.extremes(largest, {f"{name}_seq_min": means}, where=rows)
    if applied is not None:
        means = layout.segment_mean(of_tokens(values))
    beyond = {f"{name}_seq_fraction_high": means > highest}
    if two_sided:
        beyond[f"{name}_seq_fraction_low"] = means < lowest
    stats.means(beyond, over=total, where=rows)


def kept_statistics(stats: Stats, weights: torch.Tensor | None, keep: torch.Tensor, layout: Layout) -> None:
    """Report how much is masked, and how even the weights are; a row's weight is the mean of its tokens' weights."""
    stats.mean(f"{PREFIX}masked_fraction", ~keep, over="tokens")
    stats.mean(f"{PREFIX}seq_masked_fraction", layout.has_tokens & ~layout.segment_any(keep), over="rows")
    row_weights = layout.segment_mean(keep.double() if weights is None else torch.where(keep, weights, 0.0))
    stats.effective_sample_size(f"{PREFIX}eff_sample_size", row_weights, over="rows")


def age_statistics(
    stats: Stats,
    x: torch.Tensor,
    divergences: dict[str, torch.Tensor],
    bucket: torch.Tensor,
    truncated: torch.Tensor,
    weights: torch.Tensor | None,
    keep: torch.Tensor,
) -> None:
    """Report the same statistics by staleness, token by token: they show where the correction begins to matter.

    Args:
        bucket: age bucket of each token, int64 [N].
        truncated: tokens whose weight was cut off at the threshold, bool [N].
        weights: the weights in use [N], or None.
        keep: tokens that are not rejected, bool [N].
    """
    name = f"{PREFIX}{{age}}"
    weights = torch.ones_like(x) if weights is None else weights
    means = {f"{name}/{divergence}": values for divergence, values in divergences.items()}
    means |= {
        f"{name}/ratio_mean": _clipped(x).exp(),
        f"{name}/truncated_fraction": truncated,
        f"{name}/weight_mean": weights,
        f"{name}/masked_fraction": ~keep,
    }
    stats.by_age(bucket, means, {f"{name}/eff_sample_size": weights}, share=f"{name}/fraction", over="tokens")


def _strictest(lower: Bound, upper: Bound, layout: Layout) -> tuple[Bound, Bound]:
    """Bounds of row means [B]: the strictest of the row's tokens if these differ."""
    lowest = layout.segment_max(lower) if isinstance(lower, torch.Tensor) else lower
    highest = -layout.segment_max(-upper) if isinstance(upper, torch.Tensor) else upper
    return lowest, highest


def _clipped(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _bounded_exp(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(max=EXP_BOUND).exp()
