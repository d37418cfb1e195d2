"""Truncated importance weights pi_old / pi_rollout (arXiv 1802.01561 truncates the same way)."""

from __future__ import annotations

from typing import Literal

import torch

from learner.correction.layout import Layout

# exp() of a longer log ratio says nothing more and would overflow what is computed from it.
LOG_RATIO_BOUND = 20.0


def ratios(x: torch.Tensor, layout: Layout, level: Literal["token", "sequence"]) -> torch.Tensor:
    """exp(clip(x, +-20)) of each token [N], or exp(clip(sum of x, +-20)) of each row [B].

    Args:
        x: log pi_old - log pi_rollout of each model token [N].
    """
    if level == "sequence":
        x = layout.segment_sum(x)
    return x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def truncation(threshold: float, factors: torch.Tensor | None) -> torch.Tensor | float:
    """The upper bound C, or C^factor where it depends on age."""
    return threshold if factors is None else threshold**factors
