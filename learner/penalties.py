"""What is added to the policy loss, or taken out of it, token by token."""

from __future__ import annotations

import math

import torch

from learner.correction.weights import LOG_RATIO_BOUND

LOW_VAR_BOUND = 10.0


def reference_kl(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate of KL(pi_theta || pi_ref) at each sampled token [N], with gradient.

    With d = log pi_theta - log pi_ref: k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d (Schulman, "Approximating KL
    divergence"); low_var_kl is k3 within [-10, 10], as verl has it. The gradient of k1 is zero on average; that of
    k2 is the KL's own.

    Raises:
        ValueError: the estimator is unknown.
    """
    gap = (logprobs - reference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return gap.square() / 2
    if estimator in ("k3", "low_var_kl"):
        k3 = (-gap).expm1() + gap
        return k3 if estimator == "k3" else k3.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)
    raise ValueError(f"kl_estimator {estimator!r} is unknown; allowed: k1, k2, k3, low_var_kl")


def without_sure_negatives(
    keep: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, max_prob: float
) -> torch.Tensor:
    """Drop the tokens of negative samples that the proximal policy is sure of, bool [N].

    A failed response shares most of its confident tokens with successful ones; with one response a prompt nothing
    cancels their penalty. The idea is that of arXiv 2606.17250 (negative token filtering); the criterion, a
    probability above `max_prob`, is ours.
    """
    if max_prob >= 1:
        return keep
    return keep & ~((advantages < 0) & (old > math.log(max_prob)))
