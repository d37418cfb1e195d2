"""How far one step moved the policy, for the `ledger` drift mode."""

from __future__ import annotations

import torch

from learner.batch import MicroBatch


def moved(before: torch.Tensor, after: torch.Tensor, micro: MicroBatch) -> tuple[float, float]:
    """Sum of |log pi_{v+1} - log pi_v| over the model tokens of a micro-batch, and their number.

    Args:
        before, after: log-probs [N].
    """
    return float((after - before).abs().sum()), micro.model_tokens
