"""The built-in losses by name, and the public function of padded rows [B, T]."""

from __future__ import annotations

import torch

from common.config import AlgorithmConfig
from common.config.algorithm import loss_options, weighs
from common.config.losses import spec_of
from learner.batch.layout import Layout
from learner.correction import Correction
from learner.losses import by_row, by_token, covariance
from learner.losses.aggregation import Denominators, aggregate_tokens, row_lengths
from learner.losses.tokens import PolicyTokens, TokenLoss

LOSSES: dict[str, TokenLoss] = {
    "ppo_clip": by_token.ppo_clip,
    "gspo": by_row.gspo,
    "cispo": by_token.cispo,
    "sapo": by_token.sapo,
    "reinforce": by_token.reinforce,
    "gpg": by_token.reinforce,
    "double_sided": by_token.double_sided,
    "importance_sampling": by_token.importance_sampling,
    "dppo_tv": by_token.dppo_tv,
    "dppo_kl": by_token.dppo_kl,
    "dro": by_token.dro,
    "geo_mean": by_row.geo_mean,
    "vespo": by_row.vespo,
    "clip_cov": covariance.clip_cov,
    "kl_cov": covariance.kl_cov,
}


def policy_loss(
    name: str,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: AlgorithmConfig,
    correction: Correction | None = None,
    denominators: Denominators | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss `name` of rows, and its metrics. Values in masked places are never read.

    Args:
        logprobs: log pi_theta, with gradient [B, T].
        old_logprobs: log pi_old: the proximal policy, or in bypass mode the generating one [B, T].
        advantages: one per token [B, T].
        mask: model tokens [B, T]; the correction's mask replaces it.
        correction: the mask after rejection, and importance weights. With `proximal: rollout` the weights apply to
            `reinforce` and `dro` only, because the ratio of most other losses contains them already.
        denominators: global counts; by default those of this batch, after rejection, or before it with
            `algorithm.correction.skyrl`.
        rollout_logprobs: log pi_rollout [B, T], which `double_sided` bounds; by default `old_logprobs`.

    With `aggregation: prompt-mean`, every `config.responses` rows, one after another, answer one prompt.

    Raises:
        ValueError: the loss or the aggregation is unknown, an option is wrong, or shapes differ.
    """
    if name not in LOSSES:
        raise ValueError(f"loss {name!r} is unknown; allowed: {', '.join(LOSSES)}")
    loss_options(name, config)
    keep_BT = (correction.mask if correction else mask).bool()
    rollout = old_logprobs if rollout_logprobs is None else rollout_logprobs
    tensors = (logprobs, old_logprobs, advantages, mask, keep_BT, rollout)
    shapes = [list(tensor.shape) for tensor in tensors]
    if any(shape != shapes[0] for shape in shapes) or mask.ndim != 2:
        raise ValueError(f"logprobs, old_logprobs, advantages and mask must all be [B, T]; given {shapes}")
    layout, places = Layout.of_mask(mask.bool(), config.together)

    def tokens(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(-1).index_select(0, places)

    keep = tokens(keep_BT)
    counted = keep_BT if config.correction.renormalizes else mask
    denominators = denominators or Denominators.of(counted, layout.shares)
    weights = None
    if correction is not None and correction.weights is not None and weighs(name, config.proximal):
        weights = torch.where(keep, tokens(correction.weights), 0.0)
    policy_tokens = PolicyTokens.of(
        logprobs=tokens(logprobs),
        old=tokens(old_logprobs),
        rollout=tokens(rollout),
        advantages=tokens(advantages),
        keep=keep,
        layout=layout,
        config=config,
        weights=weights,
    )
    losses, values = LOSSES[name](policy_tokens, config)
    if weights is not None and not spec_of(name).weighs_rows:
        losses = losses * weights.to(losses.dtype)
    lengths = row_lengths(keep, layout, config)
    loss = aggregate_tokens(losses, keep, layout, config.aggregation, denominators, lengths)
    values["actor/ppo_kl"] = -policy_tokens.log_ratio
    count = max(denominators.tokens, 1.0)
    metrics = {key: float(torch.where(keep, value.detach(), 0).sum().double()) / count for key, value in values.items()}
    return loss, {"actor/pg_loss": float(loss.detach())} | metrics
