"""Losses that look at the tokens of a row together; a row is never split between micro-batches."""

from __future__ import annotations

import math

import torch

from common.config import AlgorithmConfig
from common.config.algorithm import loss_options
from common.config.stages import LOG_RATIO_BOUND
from learner.losses.tokens import PolicyTokens, TokenLosses, bounded_exp, clipped

# verl's bound of gspo's token ratios.
GSPO_BOUND = 10.0
# verl adds this to a weight before its logarithm.
SMALLEST_WEIGHT = 1e-10
# TRL's least weight of vespo's rows.
VESPO_LEAST = math.log(1e-8)


def gspo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """PPO on the geometric mean of a row's ratios (arXiv 2507.18071), with each token's own gradient (GSPO-token)."""
    options = loss_options("gspo", config)
    mean = tokens.layout.expand(tokens.row_mean(tokens.log_ratio)).detach()
    log_ratio = mean + tokens.logprobs - tokens.logprobs.detach()
    ratio = log_ratio.clamp(max=GSPO_BOUND).exp()
    plain, held, counts = clipped(ratio, tokens.advantages, options["low"], options["high"])
    return torch.maximum(plain, held), counts


def geo_mean(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """-A times the geometric mean of a row's ratios, each clipped in log space (GMPO, arXiv 2507.20673).

    Each token of a row has the row's loss, so that `seq-mean-token-mean` makes the mean over rows. Importance weights
    enter as their geometric mean over the row.
    """
    options, x, sign = loss_options("geo_mean", config), tokens.log_ratio, tokens.advantages.sign()
    held = x.clamp(-options["low"], options["high"])
    pessimistic = sign * torch.minimum(sign * x, sign * held)
    ratio = bounded_exp(tokens.row_mean(pessimistic))
    if tokens.weights is not None:
        logs = (tokens.weights + SMALLEST_WEIGHT).log()
        ratio = ratio * tokens.layout.mean_where(logs, tokens.keep).exp().to(ratio.dtype)
    losses = tokens.layout.expand(-tokens.row_mean(tokens.advantages) * ratio)
    moved, positive = x != held, tokens.advantages > 0
    return losses, {"actor/pg_clipfrac": moved & positive, "actor/pg_clipfrac_lower": moved & (tokens.advantages < 0)}


def vespo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """-phi(w) A log pi_theta, phi(w) = w^k e^(lambda (1 - w)) of the row's whole ratio w (arXiv 2602.10693).

    phi is 1 on-policy, and small far away on either side; k and lambda depend on the advantage's sign. Importance
    weights multiply w.
    """
    options, kept = loss_options("vespo", config), tokens.keep
    x = tokens.log_ratio.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    log_w = tokens.layout.segment_sum(torch.where(kept, x, 0.0))
    if tokens.weights is not None:
        log_w = log_w + _log_row_weights(tokens, tokens.weights, config).to(log_w.dtype)
    log_w = tokens.layout.expand(log_w.clamp(VESPO_LEAST, LOG_RATIO_BOUND))
    positive = tokens.advantages >= 0
    k, rate = (
        torch.where(positive, options[f"{name}_pos"], options[f"{name}_neg"]).to(log_w.dtype)
        for name in ("k", "lambda")
    )
    phi = (rate + k * log_w - rate * log_w.exp()).exp()
    return -phi * tokens.advantages * tokens.logprobs, {"actor/vespo_weight": phi}


def _log_row_weights(tokens: PolicyTokens, weights: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """The logarithm of each row's importance weight [B]: the product over its tokens, or the weight they all share."""
    logs, weight = weights.log().clamp(VESPO_LEAST, LOG_RATIO_BOUND), config.correction.weight
    if weight is not None and weight.of_rows:
        return tokens.layout.mean_where(logs, tokens.keep)
    return tokens.layout.segment_sum(torch.where(tokens.keep, logs, 0.0))
