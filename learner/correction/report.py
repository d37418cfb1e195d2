"""From summed statistics to metrics: `rollout_corr/...`, by the names of verl and of SkyRL."""

from __future__ import annotations

import math

from common.config import CorrectionConfig, SkyRLCorrection
from learner.correction.diagnostics import age_metrics, divergence_metrics
from learner.correction.family import Family
from learner.correction.tally import Totals


def correction_metrics(totals: Totals, config: CorrectionConfig) -> dict[str, float]:
    """Metrics of all tokens the totals are of, by name without prefix; {} where there were none."""
    sums, peaks = totals.sums, totals.peaks
    tokens, rows = sums["tokens"], sums["all_rows"]
    if tokens == 0:
        return {}
    found = divergence_metrics(sums, peaks, tokens, rows)
    found |= _skyrl(totals, config.skyrl) if config.skyrl is not None else _verl(totals, config)
    found["eff_sample_size"] = effective_sample_size(sums)
    found["masked_fraction"] = 1 - sums["kept_tokens"] / tokens
    found["seq_masked_fraction"] = 1 - sums["kept_rows"] / sums["rows"]
    found["nonfinite_fraction"] = sums["nonfinite"] / tokens
    if "by_age" in totals.tables:
        found |= age_metrics(totals.tables["by_age"])
    return {name: value for name, value in found.items() if math.isfinite(value)}


def effective_sample_size(sums: dict[str, float]) -> float:
    """(sum w)^2 / (R sum w^2) over the weights of all R rows, rejected ones being 0: between 0 and 1."""
    if sums["row_weight2"] == 0:
        return 0.0
    return min(1.0, sums["row_weight"] ** 2 / (sums["rows"] * sums["row_weight2"]))


def _verl(totals: Totals, config: CorrectionConfig) -> dict[str, float]:
    sums, peaks = totals.sums, totals.peaks
    tokens, rows, full_rows = sums["tokens"], sums["all_rows"], sums["rows"]
    found: dict[str, float] = {}
    if config.rollout_is is not None:
        family = Family("rollout_is", 1.0, config.rollout_is == "sequence")
        of_family = family.metrics(sums, peaks, tokens, rows)
        # verl gives this one's fractions another name.
        for side in ("high", "low"):
            of_family[f"rollout_is_ratio_fraction_{side}"] = of_family.pop(f"rollout_is_fraction_{side}")
        found |= of_family
        found["rollout_is_eff_sample_size"] = family.effective_sample_size(sums, tokens)
        if config.rollout_is_batch_normalize:
            found["rollout_is_batch_norm_factor"] = mean_weight(sums)
    if config.rollout_token_veto_threshold is not None:
        found["rollout_is_veto_fraction"] = sums["veto_rows"] / full_rows
        found["rollout_is_catastrophic_token_fraction"] = sums["veto_tokens"] / tokens
    for rule in config.rules():
        name = f"rollout_rs_{rule.name}"
        family = Family(name, 0.0, rule.level != "token")
        found |= family.metrics(sums, peaks, tokens, full_rows, two_sided=rule.estimator == "k1")
        found[f"{name}_masked_fraction"] = sums[f"{name}_masked"] / tokens
        found[f"{name}_seq_masked_fraction"] = sums[f"{name}_seq_masked"] / full_rows
    if config.rollout_rs is not None:
        found["rollout_rs_masked_fraction"] = sums["rs_masked"] / tokens
        found["rollout_rs_seq_masked_fraction"] = sums["rs_seq_masked"] / rows
    return found


def _skyrl(totals: Totals, config: SkyRLCorrection) -> dict[str, float]:
    sums, peaks = totals.sums, totals.peaks
    tokens, rows = sums["tokens"], sums["all_rows"]
    cells = sums["cells"]
    mean = sums["is_ratio"] / cells
    spread = max(sums["is_ratio2"] - cells * mean**2, 0.0)
    found = {
        "is_ratio_mean": sums["is_ratio"] / tokens,
        "is_ratio_std": math.sqrt(spread / (cells - 1)) if cells > 1 else 0.0,
        "is_ratio_max": peaks["is_ratio_max"],
        "is_ratio_min": -peaks["is_ratio_min"],
    }
    if config.tis_ratio_type == "token":
        found["tis_token_clip_high_ratio"] = sums["tis_clipped"] / max(sums["tis_tokens"], 1.0)
    if config.tis_ratio_type == "sequence":
        found["tis_seq_clip_high_ratio"] = sums["tis_clipped"] / rows
    for rule in (*config.before_weights(), *config.after_weights()):
        if rule.level == "token":
            found["token_mask_ratio"] = sums["token_mask"] / max(sums["token_mask_of"], 1.0)
            continue
        for side in ("masked", "over_high", "under_low"):
            found[f"{rule.name}_{side}_ratio"] = sums[f"{rule.name}_{side}"] / rows
    return found


def mean_weight(sums: dict[str, float]) -> float:
    """Mean of the truncated weights, over tokens or over rows with tokens; 1 where there are none."""
    return sums["weight_sum"] / sums["weight_count"] if sums["weight_count"] and sums["weight_sum"] > 0 else 1.0
