"""Losses that look at each token by itself."""

from __future__ import annotations

import torch

from common.config import AlgorithmConfig
from common.config.algorithm import loss_options
from learner.losses.tokens import PolicyTokens, TokenLosses, bounded_exp, clipped

# verl's guard of a probability that has become one.
ROUNDING = 1e-8


def ppo_clip(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """PPO with clip-higher (DAPO, arXiv 2503.14476) and dual clip (arXiv 1912.09729)."""
    options, advantages = loss_options("ppo_clip", config), tokens.advantages
    plain, held, counts = clipped(bounded_exp(tokens.log_ratio), advantages, options["low"], options["high"])
    bound = -advantages * options["cap"]
    pessimistic = torch.maximum(plain, held)
    counts["actor/pg_clipfrac_lower"] = (pessimistic > bound) & (advantages < 0)
    return torch.where(advantages < 0, torch.minimum(pessimistic, bound), pessimistic), counts


def cispo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """REINFORCE with a clipped ratio as a constant factor (MiniMax-M1, arXiv 2506.13585): no token is lost."""
    options, ratio = loss_options("cispo", config), bounded_exp(tokens.log_ratio.detach())
    low, high = 1 - options["low"], 1 + options["high"]
    losses = -tokens.advantages * ratio.clamp(low, high) * tokens.logprobs
    return losses, {"actor/clip_low": ratio < low, "actor/clip_high": ratio > high}


def sapo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """A soft gate, sigmoid(tau (ratio - 1)) 4 / tau, in place of the clip (arXiv 2511.20347)."""
    options, ratio = loss_options("sapo", config), bounded_exp(tokens.log_ratio)
    tau = torch.where(tokens.advantages > 0, options["tau_pos"], options["tau_neg"]).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1))
    # 4 s (1 - s) is the gate's slope over that of an unclipped ratio: 1 on-policy, 0 far away.
    return -tokens.advantages * gate * 4 / tau, {"actor/gate_slope": 4 * gate * (1 - gate)}


def reinforce(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """-A log pi_theta (Williams 1992; GPG, arXiv 2504.02546); importance weights, if any, come as factors."""
    return -tokens.advantages * tokens.logprobs, {}


def importance_sampling(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """-A ratio, with nothing clipped, as in SkyRL."""
    return -tokens.advantages * bounded_exp(tokens.log_ratio), {}


def double_sided(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """-A ratio where pi_theta / pi_rollout is inside the band, nothing outside (IcePop; SAO, arXiv 2607.07508)."""
    options, away = loss_options("double_sided", config), (tokens.logprobs - tokens.rollout_logprobs).detach()
    # exp(bounded) compares like the ratio itself, and never overflows.
    distance = bounded_exp(away)
    inside = (distance >= options["low"]) & (distance <= options["high"])
    ratio = bounded_exp(torch.where(inside, tokens.log_ratio, 0.0))
    losses = torch.where(inside, -tokens.advantages * ratio, 0.0)
    return losses, {
        "actor/band_low": distance < options["low"],
        "actor/band_high": distance > options["high"],
    }


def dro(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """-(A log pi_theta - beta / 2 x^2), x = log pi_theta - log pi_old, as in verl."""
    penalty = loss_options("dro", config)["beta"] / 2 * tokens.log_ratio.square()
    return -(tokens.advantages * tokens.logprobs - penalty), {"actor/dro_penalty": penalty}


def dppo_tv(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """Divergence PPO by total variation (arXiv 2602.04879): tokens whose probability has moved too far are left out.

    Only in the direction of the advantage: p - q at most `high` if A > 0, otherwise at least -`low`.
    """
    options = loss_options("dppo_tv", config)
    moved = tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()
    valid = torch.where(tokens.advantages > 0, moved <= options["high"], moved >= -options["low"])
    return _dppo(tokens, valid, options["cap"])


def dppo_kl(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """Divergence PPO by the KL of taking the token or not (arXiv 2602.04879), bounded as in `dppo_tv`."""
    options = loss_options("dppo_kl", config)
    log_p, log_q = tokens.logprobs.detach(), tokens.old_logprobs
    p, q = log_p.exp(), log_q.exp()
    divergence = q * (log_q - log_p) + (1 - q) * ((1 - q + ROUNDING) / (1 - p + ROUNDING)).log()
    valid = torch.where(
        tokens.advantages > 0,
        (divergence <= options["high"]) | (p <= q),
        (divergence <= options["low"]) | (p >= q),
    )
    return _dppo(tokens, valid, options["cap"])


def _dppo(tokens: PolicyTokens, valid: torch.Tensor, cap: float) -> TokenLosses:
    """-A min(ratio, cap) log pi_theta, the ratio being constant, where valid; 0 elsewhere."""
    ratio = bounded_exp(tokens.log_ratio.detach())
    losses = torch.where(valid, -tokens.advantages * ratio.clamp(max=cap) * tokens.logprobs, 0.0)
    return losses, {"actor/pg_clipfrac": ~valid, "actor/pg_clipfrac_lower": valid & (ratio > cap)}
