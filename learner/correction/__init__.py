"""Off-policy correction: the gap between the policy that generated the tokens and the proximal policy.

With x = log pi_old - log pi_rollout on model tokens, importance weights multiply token losses, and rejection rules
shrink the mask. One engine reads verl's fields and SkyRL's; docs/correction.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from common.config import CorrectionConfig
from learner.batch.layout import Layout, padded
from learner.correction.engine import correct_tokens
from learner.stats import Stats

__all__ = [
    "BATCH_NORM_FACTOR",
    "Correction",
    "CorrectionConfig",
    "correct",
    "correct_tokens",
    "weight_divisor",
]

# The metric that the weights are divided by with `rollout_is_batch_normalize`.
BATCH_NORM_FACTOR = "rollout_corr/rollout_is_batch_norm_factor"
# Weights with a smaller mean are not normalised, as in verl: dividing by so small a number would amplify noise.
SMALLEST_MEAN = 1e-8


def weight_divisor(metrics: Mapping[str, float]) -> float:
    """The divisor of the weights with `rollout_is_batch_normalize`: their mean, read from the metrics, or 1."""
    mean = metrics.get(BATCH_NORM_FACTOR, 0.0)
    return mean if mean > SMALLEST_MEAN else 1.0


@dataclass(frozen=True, slots=True)
class Correction:
    """Weights and mask of padded rows, for the loss, and the metrics.

    Attributes:
        weights: importance weights [B, T], constant in the gradient, zero where masked; None if not weighted.
        mask: tokens that take part in the loss, bool [B, T].
        metrics: `rollout_corr/...`.
    """

    weights: torch.Tensor | None
    mask: torch.Tensor
    metrics: dict[str, float] = field(default_factory=dict)


def correct(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    config: CorrectionConfig,
    ages: torch.Tensor | None = None,
) -> Correction:
    """Weights, mask and metrics of rows that are a whole batch.

    Args:
        old_logprobs: log pi_old of each token [B, T].
        rollout_logprobs: log pi_rollout of each token [B, T].
        mask: true on model tokens [B, T]; values elsewhere are never read.
        ages: versions between each token's weights and the batch's, int64 [B, T]; None omits the metrics by age.

    Raises:
        ValueError: the shapes differ.
    """
    tensors = {"old_logprobs": old_logprobs, "rollout_logprobs": rollout_logprobs, "mask": mask}
    if ages is not None:
        tensors["ages"] = ages
    if mask.ndim != 2 or any(tensor.shape != mask.shape for tensor in tensors.values()):
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"all must be [B, T]; given {shapes}")
    on = mask.bool()
    layout, places = Layout.of_mask(on)

    def tokens(values: torch.Tensor) -> torch.Tensor:
        return values.detach().reshape(-1).index_select(0, places)

    stats = Stats()
    corrected = correct_tokens(
        tokens(old_logprobs),
        tokens(rollout_logprobs),
        layout,
        config,
        stats,
        None if ages is None else tokens(ages),
    )
    metrics = stats.reduce() if len(places) else {}
    weights = corrected.weights
    if weights is not None:
        if config.rollout_is_batch_normalize:
            divisor = weight_divisor(metrics)
            weights = weights / divisor
            if config.compatible_metrics and metrics:
                metrics[BATCH_NORM_FACTOR] = divisor
        weights = padded(weights, places, on.shape).to(old_logprobs.dtype)
    return Correction(weights, padded(corrected.keep, places, on.shape), metrics)
