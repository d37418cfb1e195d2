"""The share of tokens that the off-policy correction masks, and what to try when it is too large."""

from __future__ import annotations

from collections.abc import Sequence

from common.config import Config, CorrectionConfig

METRIC = "rollout_corr/masked_fraction"
RECENT = 5  # newest steps, whose mean share decides
MOST = 0.25


def recent_warning(shares: Sequence[float], advice: str) -> str | None:
    """A sentence if too many of the newest steps' tokens are masked; None before there are enough steps."""
    newest = shares[-RECENT:]
    share = sum(newest) / RECENT
    if len(newest) < RECENT or share <= MOST:
        return None
    return f"{share:.0%} of the tokens of the last {RECENT} steps are {advice}"


def what_masks(correction: CorrectionConfig) -> str:
    """The preset and the thresholds that mask tokens, by their names in the configuration."""
    fields: dict[str, object] = {}
    if correction.rollout_rs is not None:
        fields |= {"rollout_rs": correction.rollout_rs, "rollout_rs_threshold": correction.rollout_rs_threshold}
    for name in ("rollout_token_veto_threshold", "m2_threshold"):
        fields[name] = getattr(correction, name)
    if correction.skyrl is not None:
        fields |= {f"skyrl.{name}": value for name, value in correction.skyrl.bounds().items()}
    bounds = ", ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    name = f"preset {correction.preset_name}" if correction.preset_name else "algorithm.correction"
    return f"{name} ({bounds or 'no rule: only tokens without a finite log-prob'})"


def advice(config: Config) -> str:
    """What masks tokens in a run, and changes that keep the policy nearer to its samples."""
    learner, dtype = config.learner, config.model.dtype
    options = [f"fewer learner.mini_batches (now {learner.mini_batches})"] if learner.mini_batches > 1 else []
    options += [f"a smaller learner.lr (now {learner.lr:g})", "another preset (spo correction list)"]
    options += [f"model.dtype=float32 for the generators (now {dtype})"] if dtype != "float32" else []
    return f"masked by {what_masks(config.algorithm.correction)}; try {', '.join(options[:-1])} or {options[-1]}"
