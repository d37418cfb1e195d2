"""Policy losses of model tokens [N], their aggregation to one number, and the padded [B, T] form of both.

`by_token`, `by_row` and `covariance` have the formulas, by what a token's loss depends on.
"""

from __future__ import annotations

from learner.losses.aggregation import Denominators, aggregate
from learner.losses.own import load_loss
from learner.losses.policy_loss import LOSSES, policy_loss
from learner.losses.tokens import PolicyTokens, TokenLoss, TokenLosses

__all__ = [
    "LOSSES",
    "Denominators",
    "PolicyTokens",
    "TokenLoss",
    "TokenLosses",
    "aggregate",
    "load_loss",
    "policy_loss",
]
