"""Off-policy correction: the gap between the policy that generated the tokens and the proximal policy.

With x = log pi_old - log pi_rollout on model tokens, truncated importance weights exp(x) multiply the token
losses (field names and definitions are verl's). Everything here sees padded rows [B, T], never packed tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from common.config import CorrectionConfig

__all__ = ["Correction", "CorrectionConfig", "correct", "diagnostics", "importance_weights"]

# exp() of a longer log ratio says nothing more and would overflow.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True)
class Correction:
    """What the loss needs of the correction.

    Attributes:
        weights: importance weights [B, T], constant in the gradient, zero where masked; None: no weighting.
        mask: tokens that take part in the loss, bool [B, T].
        metrics: `rollout_corr/...`, for people.
    """

    weights: torch.Tensor | None
    mask: torch.Tensor
    metrics: dict[str, float] = field(default_factory=dict)


def correct(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor, config: CorrectionConfig
) -> Correction:
    """Weights, mask and diagnostics of a batch of rows.

    Args:
        old_logprobs: log pi_old of each token [B, T].
        rollout_logprobs: log pi_rollout of each token [B, T].
        mask: true on model tokens [B, T]; values elsewhere are never read.

    Raises:
        ValueError: the shapes differ.
    """
    weights = importance_weights(old_logprobs, rollout_logprobs, mask, config)
    return Correction(weights, mask.bool(), diagnostics(old_logprobs, rollout_logprobs, mask, config))


def importance_weights(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor, config: CorrectionConfig
) -> torch.Tensor | None:
    """Truncated importance weights [B, T], zero where masked; None if the configuration wants none."""
    if config.rollout_is is None:
        return None
    log_ratio = _log_ratio(old_logprobs, rollout_logprobs, mask)
    weights = _ratio(log_ratio, config).clamp(max=config.rollout_is_threshold)
    return torch.where(mask.bool(), weights, 0.0)


@torch.no_grad()
def diagnostics(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor, config: CorrectionConfig
) -> dict[str, float]:
    """How far apart the two policies are: `rollout_corr/...`; {} where no token is unmasked.

    Mean, extremes and fractions are of the untruncated weights, std and effective sample size of weights
    clamped to [1/C, C].
    """
    log_ratio = _log_ratio(old_logprobs, rollout_logprobs, mask)
    on = mask.bool()
    if not on.any():
        return {}
    x = log_ratio[on]
    found = {
        "kl": -x.mean(),
        "k3_kl": (x.exp() - x - 1).mean(),
        "chi2_token": (2 * x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).exp().mean() - 1,
    }
    if config.rollout_is is not None:
        bound = config.rollout_is_threshold
        ratio = _ratio(log_ratio, config).expand_as(log_ratio)[on]
        clamped = ratio.clamp(1 / bound, bound)
        found |= {
            "rollout_is_mean": ratio.mean(),
            "rollout_is_max": ratio.max(),
            "rollout_is_min": ratio.min(),
            "rollout_is_std": clamped.std(correction=0),
            "rollout_is_eff_sample_size": clamped.mean().square() / clamped.square().mean(),
            "rollout_is_ratio_fraction_high": (ratio > bound).to(ratio.dtype).mean(),
            "rollout_is_ratio_fraction_low": (ratio < 1 / bound).to(ratio.dtype).mean(),
        }
    values = torch.stack([value.double() for value in found.values()]).tolist()
    return {f"rollout_corr/{name}": value for name, value in zip(found, values, strict=True) if math.isfinite(value)}


def _ratio(log_ratio: torch.Tensor, config: CorrectionConfig) -> torch.Tensor:
    """pi_old / pi_rollout of each token [B, T], or of each row [B, 1]."""
    if config.rollout_is == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _log_ratio(old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log pi_old - log pi_rollout, zero where masked, without gradient [B, T]."""
    if not old_logprobs.shape == rollout_logprobs.shape == mask.shape or mask.ndim != 2:
        raise ValueError(
            "old_logprobs, rollout_logprobs and mask must all be [B, T]; given "
            f"{list(old_logprobs.shape)}, {list(rollout_logprobs.shape)}, {list(mask.shape)}"
        )
    # `where`, not a product: whatever stands in masked places, NaN too, must not leak.
    return torch.where(mask.bool(), old_logprobs.detach() - rollout_logprobs.detach(), 0.0)
