"""Rejection: which tokens and rows are too far off to learn from. It changes the mask, never the weights."""

from __future__ import annotations

import torch

from common.config import Rule
from learner.correction.layout import Layout
from learner.correction.weights import LOG_RATIO_BOUND


def estimate(x: torch.Tensor, estimator: str) -> torch.Tensor:
    """k1 = -x, k2 = x^2 / 2 or k3 = e^x - 1 - x (Schulman, "Approximating KL divergence") of each token."""
    x = x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if estimator == "k1":
        return -x
    return x.square() / 2 if estimator == "k2" else x.expm1() - x


def statistic(x: torch.Tensor, rule: Rule, layout: Layout, keep: torch.Tensor) -> torch.Tensor:
    """What the rule bounds: of each token [N], or of each row [B], zero where a row has no token left.

    Args:
        keep: tokens that take part in statistics of rows, bool [N].
    """
    if rule.level == "any":
        return -x
    values = estimate(x, rule.estimator)
    if rule.level == "token":
        return values
    if rule.level == "max":
        return layout.segment_max(torch.where(keep, values, 0.0)).clamp(min=0)
    total = layout.segment_sum(torch.where(keep, values, 0.0))
    return total if rule.level == "sum" else total / layout.segment_sum(keep.double()).clamp(min=1)


def bounds(
    rule: Rule, factors: tuple[torch.Tensor | None, torch.Tensor | None]
) -> tuple[torch.Tensor | float, torch.Tensor | float]:
    """The rule's bounds, multiplied with the factors of the tokens' or the rows' age if there are any."""
    factor = factors[0] if rule.level in ("token", "any") else factors[1]
    return (rule.lower, rule.upper) if factor is None else (rule.lower * factor, rule.upper * factor)


def kept(
    values: torch.Tensor,
    rule: Rule,
    lower: torch.Tensor | float,
    upper: torch.Tensor | float,
    layout: Layout,
    keep: torch.Tensor,
) -> torch.Tensor:
    """Tokens the rule keeps, bool [N], whatever else dropped them."""
    inside = (values >= lower) & (values <= upper)
    if rule.level == "token":
        return inside
    if rule.level == "any":
        inside = layout.segment_sum((~inside & keep).long()) == 0
    return layout.expand(inside)
