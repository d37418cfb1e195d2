"""Policy losses of model tokens [N], their aggregation to one number, and the padded [B, T] form of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from common.config import AlgorithmConfig
from common.config.algorithm import weighs
from common.config.stages import LOG_RATIO_BOUND
from common.errors import UserError
from common.plugins import check_options, load_object
from learner.correction import Correction, Layout

# verl's bound of gspo's token ratios.
GSPO_BOUND = 10.0


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The input of a loss. Values of tokens that are not kept are zero.

    Attributes:
        logprobs: log pi_theta, with gradient [N].
        old_logprobs: log pi_old [N].
        rollout_logprobs: log pi_rollout [N].
        advantages: [N].
        keep: tokens that take part, bool [N].
        of_means: tokens that means of rows are taken over: those that take part, or with SkyRL's block, which never
            renormalises, all with finite log-probs; bool [N].
        layout: rows of the tokens.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    keep: torch.Tensor
    of_means: torch.Tensor
    layout: Layout

    @classmethod
    def of(
        cls,
        logprobs: torch.Tensor,
        old: torch.Tensor,
        rollout: torch.Tensor,
        advantages: torch.Tensor,
        keep: torch.Tensor,
        layout: Layout,
        config: AlgorithmConfig,
    ) -> PolicyTokens:
        """Zero unused values before anything is computed from them, so that NaN reaches neither loss nor gradient."""
        of_means = keep if config.correction.renormalizes else old.isfinite() & rollout.isfinite()
        logprobs, old, rollout, advantages = (
            torch.where(of_means, values, 0.0) for values in (logprobs, old, rollout, advantages)
        )
        return cls(logprobs, old, rollout, advantages, keep, of_means, layout)

    @property
    def log_ratio(self) -> torch.Tensor:
        """log pi_theta - log pi_old [N]."""
        return self.logprobs - self.old_logprobs

    def row_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of values [N] over each row's tokens [B]; 0 for a row without any."""
        total = self.layout.segment_sum(torch.where(self.of_means, values, 0.0))
        return total / self.layout.segment_sum(self.of_means.to(values.dtype)).clamp(min=1)


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over all ranks and micro-batches of one optimizer step, by which a loss is divided.

    With them, losses and metrics of micro-batches and ranks simply add up.

    Attributes:
        tokens: unmasked tokens.
        samples: samples with at least one of them; of a sample of several rows, the shares of those that have one.
        horizon: the constant length of `seq-mean-token-sum-norm`.
    """

    tokens: float
    samples: float
    horizon: float

    @classmethod
    def of(cls, mask: torch.Tensor) -> Denominators:
        """Count a single batch [B, T], which no other rank or micro-batch adds to; the horizon is its T."""
        return cls(float(mask.sum()), float(mask.bool().any(-1).sum()), float(mask.shape[-1]))

    def rescale(self, tokens: float, samples: float, mode: str) -> float:
        """The factor that turns a value divided by these counts into one divided by the given ones."""
        return self.tokens / tokens if mode == "token-mean" else self.samples / samples


# The loss of each token [N], and its metrics: values of each token [N] by name.
TokenLosses = tuple[torch.Tensor, dict[str, torch.Tensor]]
TokenLoss = Callable[[PolicyTokens, AlgorithmConfig], TokenLosses]


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
        correction: the mask that rejection left, and weights that multiply the token losses, except those whose ratio
            is the weight already: with `proximal: rollout`, of all losses but `reinforce`.
        denominators: global counts; by default those of this batch, after rejection (with SkyRL's block, before).
        rollout_logprobs: log pi_rollout [B, T], which `double_sided` bounds; by default `old_logprobs`.

    Raises:
        ValueError: the loss or the aggregation is unknown, or shapes differ.
    """
    if name not in LOSSES:
        raise ValueError(f"loss {name!r} is unknown; allowed: {', '.join(LOSSES)}")
    keep_BT = (correction.mask if correction else mask).bool()
    rollout = old_logprobs if rollout_logprobs is None else rollout_logprobs
    tensors = (logprobs, old_logprobs, advantages, mask, keep_BT, rollout)
    shapes = [list(tensor.shape) for tensor in tensors]
    if any(shape != shapes[0] for shape in shapes) or mask.ndim != 2:
        raise ValueError(f"logprobs, old_logprobs, advantages and mask must all be [B, T]; given {shapes}")
    layout, places = Layout.of_mask(mask.bool())

    def tokens(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(-1).index_select(0, places)

    keep = tokens(keep_BT)
    denominators = denominators or Denominators.of(keep_BT if config.correction.renormalizes else mask)
    policy_tokens = PolicyTokens.of(
        tokens(logprobs), tokens(old_logprobs), tokens(rollout), tokens(advantages), keep, layout, config
    )
    losses, values = LOSSES[name](policy_tokens, config)
    if correction is not None and correction.weights is not None and weighs(name, config.proximal):
        losses = losses * torch.where(keep, tokens(correction.weights), 0.0).to(losses.dtype)
    lengths = row_lengths(keep, layout, config)
    loss = aggregate_tokens(losses, keep, layout, config.aggregation, denominators, lengths)
    values["actor/ppo_kl"] = -policy_tokens.log_ratio
    count = max(denominators.tokens, 1.0)
    metrics = {key: float(torch.where(keep, value.detach(), 0).sum().double()) / count for key, value in values.items()}
    return loss, {"actor/pg_loss": float(loss.detach())} | metrics


def row_lengths(keep: torch.Tensor, layout: Layout, config: AlgorithmConfig) -> torch.Tensor:
    """The divisor of each row, [B]: its kept tokens; with SkyRL's block, which never renormalises, all."""
    return layout.segment_sum(keep.long()) if config.correction.renormalizes else layout.lengths


def ppo_clip(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """PPO with clip-higher (DAPO, arXiv 2503.14476) and dual clip (arXiv 1912.09729)."""
    ratio, advantages = _bounded_exp(tokens.log_ratio), tokens.advantages
    plain, clipped, counts = _clipped(ratio, advantages, config)
    bound = -advantages * config.clip_dual
    pessimistic = torch.maximum(plain, clipped)
    counts["actor/pg_clipfrac_lower"] = (pessimistic > bound) & (advantages < 0)
    return torch.where(advantages < 0, torch.minimum(pessimistic, bound), pessimistic), counts


def gspo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """PPO on the geometric mean of a row's ratios (arXiv 2507.18071), with each token's own gradient (GSPO-token)."""
    mean = tokens.layout.expand(tokens.row_mean(tokens.log_ratio)).detach()
    log_ratio = mean + tokens.logprobs - tokens.logprobs.detach()
    plain, clipped, counts = _clipped(log_ratio.clamp(max=GSPO_BOUND).exp(), tokens.advantages, config)
    return torch.maximum(plain, clipped), counts


def cispo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """REINFORCE with a clipped ratio as a constant factor (MiniMax-M1, arXiv 2506.13585): no token is lost."""
    ratio = _bounded_exp(tokens.log_ratio.detach())
    low, high = 1 - config.clip_low, 1 + config.clip_high
    losses = -tokens.advantages * ratio.clamp(low, high) * tokens.logprobs
    return losses, {"actor/clip_low": ratio < low, "actor/clip_high": ratio > high}


def sapo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """A soft gate, sigmoid(tau (ratio - 1)) 4 / tau, in place of the clip (arXiv 2511.20347)."""
    ratio = _bounded_exp(tokens.log_ratio)
    tau = torch.where(tokens.advantages > 0, config.tau_pos, config.tau_neg).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1))
    # 4 s (1 - s) is the gate's slope over that of an unclipped ratio: 1 on-policy, 0 far away.
    return -tokens.advantages * gate * 4 / tau, {"actor/gate_slope": 4 * gate * (1 - gate)}


def reinforce(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """-A log pi_theta (Williams 1992); importance weights, if any, come as factors."""
    return -tokens.advantages * tokens.logprobs, {}


def double_sided(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """-A ratio where pi_theta / pi_rollout is inside the band, nothing outside (IcePop; SAO, arXiv 2607.07508)."""
    away = (tokens.logprobs - tokens.rollout_logprobs).detach()
    # exp(bounded) compares like the ratio itself, and never overflows.
    distance = _bounded_exp(away)
    inside = (distance >= config.band_low) & (distance <= config.band_high)
    ratio = _bounded_exp(torch.where(inside, tokens.log_ratio, 0.0))
    losses = torch.where(inside, -tokens.advantages * ratio, 0.0)
    return losses, {
        "actor/band_low": distance < config.band_low,
        "actor/band_high": distance > config.band_high,
    }


LOSSES: dict[str, TokenLoss] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
    "double_sided": double_sided,
}


def _bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """-A ratio plain and with the ratio clipped, and where the clip binds."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    binds = clipped > plain
    return (
        plain,
        clipped,
        {
            "actor/pg_clipfrac": binds,
            "actor/clip_low": binds & (ratio < 1),
            "actor/clip_high": binds & (ratio > 1),
        },
    )


def aggregate(values: torch.Tensor, mask: torch.Tensor, mode: str, denominators: Denominators) -> torch.Tensor:
    """Token values [B, T] as one number; an empty mask gives zero, never NaN.

    Raises:
        ValueError: the mode is unknown.
    """
    layout, places = Layout.of_mask(mask.bool())
    values = values.reshape(-1).index_select(0, places)
    return aggregate_tokens(values, torch.ones_like(places).bool(), layout, mode, denominators, layout.lengths)


def aggregate_tokens(
    values: torch.Tensor,
    keep: torch.Tensor,
    layout: Layout,
    mode: str,
    denominators: Denominators,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """Token values [N] as one number, in which `seq-*` weigh each sample once, whatever its rows.

    Args:
        keep: tokens that count, bool [N]; values of others are never read.
        lengths: tokens each row is divided by in `seq-mean-token-mean`, [B].

    Raises:
        ValueError: the mode is unknown.
    """
    values = torch.where(keep, values, 0.0)
    if mode == "token-mean":
        return values.sum() / max(denominators.tokens, 1.0)
    if mode == "seq-mean-token-sum":
        return values.sum() / max(denominators.samples, 1.0)
    if mode == "seq-mean-token-mean":
        means = layout.segment_sum(values) / lengths.clamp(min=1)
        return (means * layout.shares.to(means.dtype)).sum() / max(denominators.samples, 1.0)
    if mode == "seq-mean-token-sum-norm":
        # A batch of no columns has a horizon of zero.
        return values.sum() / (max(denominators.samples, 1.0) * max(denominators.horizon, 1.0))
    raise ValueError(
        f"aggregation {mode!r} is unknown; allowed: token-mean, seq-mean-token-sum, seq-mean-token-mean, "
        "seq-mean-token-sum-norm"
    )


GROUP = "spo.losses"  # entry points of installed packages


def load_loss(config: AlgorithmConfig) -> TokenLoss:
    """The loss, ready to be called with (tokens, config).

    Raises:
        UserError: it cannot be found or imported, does not take `algorithm.loss_options`, or does not give one finite
            number per token that depends on the policy.
    """
    field = f"algorithm.loss = {config.loss!r}"
    loss = load_object(config.loss, LOSSES, "algorithm.loss", GROUP)
    if config.loss in LOSSES:
        if config.loss_options:
            raise UserError(f"algorithm.loss_options = {config.loss_options}: {config.loss!r} takes none; remove them")
        return loss
    if not callable(loss):
        raise UserError(f"{field} is no function of (tokens, config)")
    options = check_options(loss, config.loss_options, f"algorithm.loss_options of {config.loss!r}", ("tokens", config))
    own = partial(_call, loss, options, field)
    _try(own, config, field)
    return own


def _call(
    loss: Any, options: Mapping[str, Any], field: str, tokens: PolicyTokens, config: AlgorithmConfig
) -> TokenLosses:
    """Call a user's loss; it need not return metrics, and those without a prefix get `actor/`."""
    returned = loss(tokens, config, **options)
    losses, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(losses, torch.Tensor) or losses.shape != tokens.logprobs.shape:
        shape = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise UserError(
            f"{field} must return the loss of each token, a tensor {list(tokens.logprobs.shape)}, alone or with a dict "
            f"of metrics; it returned {shape}"
        )
    for name, values in metrics.items():
        if not isinstance(values, torch.Tensor) or values.shape != losses.shape:
            raise UserError(f"{field}: the metric {name!r} must be one number for each token, {list(losses.shape)}")
    return losses, {name if "/" in name else f"actor/{name}": values for name, values in metrics.items()}


def _try(loss: TokenLoss, config: AlgorithmConfig, field: str) -> None:
    """Call the loss with a few tokens, and check its result and its gradient."""
    logprobs = torch.tensor([-0.1, -2.0, -1.0, -3.0, -0.5, -1.5], requires_grad=True)
    old = torch.tensor([-0.2, -1.0, -1.0, -4.0, -0.5, -1.6])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    keep = torch.tensor([True, True, False, True, True, True])
    # The second row has no token.
    tokens = PolicyTokens.of(logprobs, old, old - 0.1, advantages, keep, Layout.of_lengths([3, 0, 3]), config)
    try:
        losses, _ = loss(tokens, config)
    except UserError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise UserError(f"{field} failed on a trial batch: {type(error).__name__}: {error}") from error
    if not bool(losses[keep].isfinite().all()):
        raise UserError(f"{field} is not finite on a trial batch: {losses.detach().tolist()}")
    gradient = torch.autograd.grad(losses[keep].sum(), logprobs, allow_unused=True)[0] if losses.requires_grad else None
    if gradient is None or not bool(gradient.any()):
        raise UserError(f"{field} has no gradient: it must depend on tokens.logprobs, not on tokens.logprobs.detach()")
    if not bool(gradient.isfinite().all()):
        raise UserError(f"{field} has a gradient that is not finite on a trial batch: {gradient.tolist()}")
