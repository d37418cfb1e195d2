"""Losses that single out the tokens whose log-prob and advantage vary together most (arXiv 2505.22617).

These tokens make a policy's entropy collapse. Means and shares are of the tokens of the whole mini-batch on all ranks;
verl's and SkyRL's are of a micro-batch, and depend on its packing.
"""

from __future__ import annotations

import torch

from common.config import AlgorithmConfig
from common.config.algorithm import loss_options
from learner.correction.ranking import largest, token_keys
from learner.losses.tokens import PolicyTokens, TokenLosses, bounded_exp, clipped


def clip_cov(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """PPO's clip, without a few tokens that are drawn from those with a covariance within bounds."""
    options = loss_options("clip_cov", config)
    plain, held, counts = clipped(bounded_exp(tokens.log_ratio), tokens.advantages, options["low"], options["high"])
    chosen = _chosen("clip_cov", tokens, config)
    return torch.where(chosen, 0.0, torch.maximum(plain, held)), counts | {"actor/cov_chosen": chosen}


def kl_cov(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """-A ratio, and for the tokens with the largest covariance a penalty coef |log pi_theta - log pi_old|."""
    chosen = _chosen("kl_cov", tokens, config)
    penalty = loss_options("kl_cov", config)["coef"] * tokens.log_ratio.abs()
    losses = -tokens.advantages * bounded_exp(tokens.log_ratio)
    return losses + torch.where(chosen, penalty, 0.0), {"actor/cov_chosen": chosen}


def columns(tokens: PolicyTokens) -> torch.Tensor:
    """The table that tokens are chosen from, float64 [N, 5]: log pi_theta, log pi_old, advantage, key, whether kept."""
    keys = token_keys(tokens.rollout_logprobs, tokens.layout)
    values = (tokens.logprobs.detach(), tokens.old_logprobs, tokens.advantages, keys, tokens.keep)
    return torch.stack([value.double() for value in values], dim=1)


def choose(loss: str, config: AlgorithmConfig, table: torch.Tensor) -> torch.Tensor:
    """The tokens that the loss chooses, bool [M], from the `columns` of all tokens of a mini-batch [M, 5]."""
    options, verdicts = loss_options(loss, config), torch.zeros(len(table), dtype=torch.bool, device=table.device)
    kept = table[:, 4].nonzero()[:, 0]
    if not len(kept):
        return verdicts
    logprobs, old, advantages, keys, _ = table[kept].unbind(1)
    covariances = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    count = max(1, int(len(kept) * options["ratio"]))
    if loss == "kl_cov":
        places = largest(covariances, keys, count)
    else:  # those with the smallest keys among tokens within the bounds at which the clip does not bind
        counts = clipped(bounded_exp(logprobs - old), advantages, options["low"], options["high"])[2]
        inside = (covariances > options["cov_low"]) & (covariances < options["cov_high"])
        candidates = (inside & ~counts["actor/pg_clipfrac"]).nonzero()[:, 0]
        places = candidates[keys[candidates].argsort(stable=True)[:count]]
    verdicts[kept[places]] = True
    return verdicts


def _chosen(loss: str, tokens: PolicyTokens, config: AlgorithmConfig) -> torch.Tensor:
    return tokens.chosen if tokens.chosen is not None else choose(loss, config, columns(tokens))
