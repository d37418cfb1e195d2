"""Policy losses over padded rows [B, T], and how token losses become one number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.config import AlgorithmConfig
from learner.correction import Correction

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True)
class Denominators:
    """What a loss is divided by: counts over all ranks and micro-batches of one optimizer step.

    With them, losses and metrics of micro-batches and ranks simply add up.

    Attributes:
        tokens: unmasked tokens.
        sequences: rows with at least one of them.
        horizon: the constant length of `seq-mean-token-sum-norm`.
    """

    tokens: float
    sequences: float
    horizon: float

    @classmethod
    def of(cls, mask: torch.Tensor) -> Denominators:
        """Those of one batch that is all there is; the horizon is its T."""
        return cls(float(mask.sum()), float(mask.any(-1).sum()), float(mask.shape[-1]))


def aggregate(values: torch.Tensor, mask: torch.Tensor, mode: str, denominators: Denominators) -> torch.Tensor:
    """Token values [B, T] as one number; an empty mask gives zero, never NaN.

    Raises:
        ValueError: the mode is unknown.
    """
    values = torch.where(mask, values, 0.0)
    if mode == "token-mean":
        return values.sum() / max(denominators.tokens, 1.0)
    if mode == "seq-mean-token-sum":
        return values.sum() / max(denominators.sequences, 1.0)
    if mode == "seq-mean-token-mean":
        return (values.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / max(denominators.sequences, 1.0)
    if mode == "seq-mean-token-sum-norm":
        return values.sum() / denominators.horizon
    raise ValueError(
        f"aggregation {mode!r} is unknown; allowed: token-mean, seq-mean-token-sum, seq-mean-token-mean, "
        "seq-mean-token-sum-norm"
    )


def policy_loss(
    name: str,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: AlgorithmConfig,
    correction: Correction | None = None,
    denominators: Denominators | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss `name` and its metrics. Values in masked places are never read.

    Args:
        logprobs: log pi_theta, with gradient [B, T].
        old_logprobs: log pi_old: the proximal policy, or in bypass mode the generating one [B, T].
        advantages: one a token [B, T].
        mask: model tokens [B, T]; the correction's mask replaces it.
        denominators: global counts; by default those of this batch.

    Raises:
        ValueError: the loss or the aggregation is unknown, or shapes differ.
    """
    if name not in LOSSES:
        raise ValueError(f"loss {name!r} is unknown; allowed: {', '.join(LOSSES)}")
    mask = (correction.mask if correction else mask).bool()
    shapes = [list(tensor.shape) for tensor in (logprobs, old_logprobs, advantages, mask)]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"logprobs, old_logprobs, advantages and mask must all be [B, T]; given {shapes}")
    denominators = denominators or Denominators.of(mask)
    # Masked places are zeroed before anything is computed from them, so that NaN reaches neither loss nor gradient.
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    advantages = torch.where(mask, advantages, 0.0)
    token_losses, counts = LOSSES[name](log_ratio, advantages, config)
    if correction is not None and correction.weights is not None:
        token_losses = token_losses * torch.where(mask, correction.weights, 0.0)
    loss = aggregate(token_losses, mask, config.aggregation, denominators)
    return loss, _metrics(loss, counts | {"actor/ppo_kl": -log_ratio}, mask, denominators)


def ppo_clip(
    log_ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO with clip-higher (DAPO, arXiv 2503.14476) and dual clip (arXiv 1912.09729): token losses [B, T]."""
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    bound = -advantages * config.clip_dual
    pessimistic = torch.maximum(plain, clipped)
    losses = torch.where(advantages < 0, torch.minimum(pessimistic, bound), pessimistic)
    is_clipped = clipped > plain
    return losses, {
        "actor/pg_clipfrac": is_clipped,
        "actor/clip_low": is_clipped & (ratio < 1),
        "actor/clip_high": is_clipped & (ratio > 1),
        "actor/pg_clipfrac_lower": (pessimistic > bound) & (advantages < 0),
    }


LOSSES: dict[str, Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]] = {"ppo_clip": ppo_clip}


@torch.no_grad()
def _metrics(
    loss: torch.Tensor, counts: dict[str, torch.Tensor], mask: torch.Tensor, denominators: Denominators
) -> dict[str, float]:
    """Means over tokens, in one trip from the device."""
    sums = torch.stack([torch.where(mask, values, 0).sum().to(loss.dtype) for values in counts.values()])
    values = torch.cat([loss.detach()[None], sums / max(denominators.tokens, 1.0)]).tolist()
    return dict(zip(("actor/pg_loss", *counts), values, strict=True))
