"""The loss of one micro-batch, top to bottom: proximal policy, correction, policy loss, aggregation, penalties."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from common.config import AlgorithmConfig, TeacherConfig
from common.config.losses import spec_of
from common.config.stages import LOG_RATIO_BOUND
from learner.batch.teacher import coarse_kl, taught_advantages, teacher_statistics, weight_at
from learner.batch.tensors import MicroBatch
from learner.correction.engine import TokenCorrection, correct_tokens
from learner.losses.aggregation import Denominators, aggregate_tokens, row_lengths
from learner.losses.tokens import PolicyTokens, TokenLoss
from learner.policy.routers import Routing
from learner.stats import Stats

K3_BOUND = 10.0


class PolicyOutput(NamedTuple):
    """The policy's answer for the model tokens: log pi_theta and the entropy of pi_theta, both [N].

    Attributes:
        routing: what the routers of a mixture of experts did; None with other models.
        likeliest: log pi_theta of a teacher's likeliest tokens [N, K]; None if it scored the sampled ones, or no token.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    routing: Routing | None = None
    likeliest: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TrainPosition:
    """Where in the run a mini-batch is trained on, and what its loss is divided by.

    Attributes:
        version: of the weights the batch began with, v_old.
        mini_batch: number of the batch's optimizer steps taken before, of `mini_batches`.
        denominators: counts of the mini-batch's model tokens and samples on all ranks, before any rejection.
    """

    version: int
    mini_batch: int
    mini_batches: int
    denominators: Denominators

    @property
    def current_version(self) -> float:
        """v_theta: between this batch's version and the next."""
        return self.version + self.mini_batch / self.mini_batches


@dataclass(frozen=True, slots=True)
class Precomputed:
    """Values computed before the micro-batch is trained on.

    Attributes:
        old: log pi_old of a recomputed proximal policy [N]; None in the first step, when it is the current policy.
        reference: log pi_ref [N]; None without a KL penalty.
        weight_mean: divisor of the importance weights (`rollout_is_batch_normalize`).
        m2_keep: tokens that `m2_threshold` keeps, bool [N]; None if the micro-batch is the whole mini-batch.
        chosen: tokens that `clip_cov` or `kl_cov` chooses, bool [N]; None if the micro-batch is the whole mini-batch.
    """

    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    weight_mean: float = 1.0
    m2_keep: torch.Tensor | None = None
    chosen: torch.Tensor | None = None


class StepLoss(NamedTuple):
    """One micro-batch's share of an optimizer step.

    Attributes:
        loss: divided by the counts before rejection; with gradient.
        parts: policy loss, KL, entropy, and the teacher's loss with its weight, divided by the same counts [4].
    """

    loss: torch.Tensor
    parts: torch.Tensor


def step_loss(
    micro: MicroBatch,
    policy: PolicyOutput,
    precomputed: Precomputed,
    position: TrainPosition,
    token_loss: TokenLoss,
    config: AlgorithmConfig,
    stats: Stats,
    teacher: TeacherConfig | None = None,
) -> StepLoss:
    """The loss of a micro-batch's model tokens. Its statistics go into `stats`.

    Args:
        policy: log-probs with gradient, and entropies [N].
        token_loss: the policy loss, one of `learner.losses` or the user's own.
        teacher: how its scores are used; None if the run has no teacher.
    """
    old = proximal_logprobs(micro, policy.logprobs, precomputed.old, position, config)
    correction, tokens = loss_input(micro, policy.logprobs, old, precomputed, position, config, stats, teacher)
    keep = tokens.keep
    losses, token_metrics = token_loss(tokens, config)
    # Losses that weigh whole rows have applied the weights already.
    if tokens.weights is not None and not spec_of(config.loss).weighs_rows:
        losses = losses * tokens.weights.to(losses.dtype)

    lengths = row_lengths(keep, micro.layout, config)

    def aggregate(values: torch.Tensor) -> torch.Tensor:
        return aggregate_tokens(values, keep, micro.layout, config.aggregation, position.denominators, lengths)

    loss = policy_loss = aggregate(losses)
    entropy = kl = distance = loss.new_zeros(())
    if config.entropy_coef:
        entropy = aggregate(policy.entropies)
        loss = loss - config.entropy_coef * entropy
    if precomputed.reference is not None:
        # A NaN at a dropped token would make the gradient NaN, even multiplied by 0.
        reference = torch.where(keep, precomputed.reference, 0.0)
        kl = aggregate(reference_kl(tokens.logprobs, reference, config.kl_estimator))
        loss = loss + config.kl_coef * kl
    if teacher is not None and teacher.form == "loss" and micro.teacher is not None:
        distance = weight_at(teacher, position.version) * aggregate(teacher_loss(micro, policy, tokens))
        loss = loss + distance

    # A mask cannot remove a NaN log-prob from the gradient.
    stats.total("not_finite", ~loss.detach().isfinite() | policy.logprobs.isnan().any())
    stats.total("learned_tokens", keep)
    stats.total("learned_samples", torch.where(micro.layout.segment_any(keep), micro.layout.shares, 0.0))
    token_metrics |= {"actor/ppo_kl": -tokens.log_ratio, "actor/entropy": policy.entropies}
    for name, values in token_metrics.items():
        stats.mean(name, torch.where(keep, values.detach(), 0), over="learned_tokens")
    if config.negative_max_prob < 1:
        stats.mean("actor/negative_filtered", correction.keep & ~keep, over="tokens")
    if teacher is not None:
        logprobs = policy.logprobs.detach()
        likeliest = None if policy.likeliest is None else policy.likeliest.detach()
        teacher_statistics(logprobs, likeliest, old, keep, micro.teacher, teacher, position.version, stats)
    if config.proximal == "compare":
        _compare(micro, policy.logprobs, old, position, stats)
    parts = (policy_loss, kl, entropy, distance)
    return StepLoss(loss, torch.stack([part.detach() for part in parts]).double())


def loss_input(
    micro: MicroBatch,
    logprobs: torch.Tensor,
    old: torch.Tensor,
    precomputed: Precomputed,
    position: TrainPosition,
    config: AlgorithmConfig,
    stats: Stats,
    teacher: TeacherConfig | None,
) -> tuple[TokenCorrection, PolicyTokens]:
    """The correction of a micro-batch, and the input of its loss: kept tokens, their advantages and weights."""
    corrected, ages = corrected_logprobs(logprobs, old, config), micro.ages(position.version)
    correction = correct_tokens(
        corrected, micro.rollout_logprobs, micro.layout, config.correction, stats, ages, precomputed.m2_keep
    )
    advantages = taught_advantages(micro.advantages, old, micro.teacher, teacher, position.version)
    keep = correction.keep & ~sure_negatives(old, advantages, config.negative_max_prob)
    weights = None
    if correction.weights is not None and config.weighs_loss:
        weights = torch.where(keep, correction.weights / precomputed.weight_mean, 0.0)
    tokens = PolicyTokens.of(
        logprobs=logprobs,
        old=old,
        rollout=micro.rollout_logprobs,
        advantages=advantages,
        keep=keep,
        layout=micro.layout,
        config=config,
        weights=weights,
        chosen=precomputed.chosen,
    )
    return correction, tokens


def proximal_logprobs(
    micro: MicroBatch,
    logprobs: torch.Tensor,
    recomputed: torch.Tensor | None,
    position: TrainPosition,
    config: AlgorithmConfig,
) -> torch.Tensor:
    """log pi_old [N], around which the loss clips: recomputed, the generating policy, or between the two."""
    if config.proximal == "rollout":
        return micro.rollout_logprobs
    if config.proximal == "interpolate":
        return interpolated_logprobs(micro, logprobs, position)
    return logprobs.detach() if recomputed is None else recomputed


def interpolated_logprobs(micro: MicroBatch, logprobs: torch.Tensor, position: TrainPosition) -> torch.Tensor:
    """log pi_old between the generating and the current policy, by each token's weight version [N].

    log pi_old = log pi_rollout + a (log pi_theta - log pi_rollout), a = (v_old - v_tok) / (v_theta - v_tok), or 0
    if v_theta = v_tok (A-3PO, arXiv 2512.06547). Before the batch's first optimizer step v_theta = v_old, so
    that a = 1 gives the recomputed policy itself; after m of M steps v_theta = v_old + m / M.

    Args:
        logprobs: log pi_theta, taken as constant [N].
    """
    age = micro.ages(position.version).to(logprobs.dtype)
    distance = age + (position.current_version - position.version)
    share = torch.where(distance > 0, age / distance.clamp(min=1e-6), 0.0)
    return micro.rollout_logprobs + share * (logprobs.detach() - micro.rollout_logprobs)


def corrected_logprobs(logprobs: torch.Tensor, old: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """Those whose gap to the generating policy is corrected [N]: log pi_old, or in bypass mode log pi_theta."""
    return logprobs.detach() if config.proximal == "rollout" else old


def sure_negatives(old: torch.Tensor, advantages: torch.Tensor, max_prob: float) -> torch.Tensor:
    """Tokens with a negative advantage that the proximal policy is sure of, bool [N]; they are not trained on.

    A failed response shares most of its confident tokens with successful ones; with one response per prompt no other
    response cancels their penalty. The idea comes from arXiv 2606.17250 (negative token filtering); the criterion, a
    probability above `max_prob`, is ours.
    """
    return (advantages < 0) & (old > math.log(max_prob)) if max_prob < 1 else torch.zeros_like(old, dtype=torch.bool)


def reference_kl(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate of KL(pi_theta || pi_ref) at each sampled token [N], with gradient, as verl and SkyRL compute it.

    With d = log pi_theta - log pi_ref: k1 = d, abs = |d|, k2 = d^2 / 2, k3 = e^-d - 1 + d (Schulman, "Approximating KL
    divergence"), k3 held within [-10, 10] and also called low_var_kl. The gradient of k1 is zero on average; that of
    k2 is the KL's own. k1+ and k3+ have the value of k1 and k3 and the gradient of k2 (straight through).

    Raises:
        ValueError: the estimator is unknown.
    """
    gap = logprobs - reference
    if estimator == "k1":
        return gap
    if estimator == "abs":
        return gap.abs()
    if estimator == "k2":
        return gap.square() / 2
    if estimator in ("k3", "low_var_kl"):
        bounded = gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return ((-bounded).expm1() + bounded).clamp(-K3_BOUND, K3_BOUND)
    if estimator in ("k1+", "k3+"):
        slope = gap.square() / 2
        return reference_kl(logprobs, reference, estimator[:-1]).detach() + (slope - slope.detach())
    raise ValueError(
        f"kl_estimator {estimator!r} is unknown; allowed: k1, k2, k3, low_var_kl, abs, k1+, k3+ (the + takes the "
        "gradient of k2)"
    )


def teacher_loss(micro: MicroBatch, policy: PolicyOutput, tokens: PolicyTokens) -> torch.Tensor:
    """Reverse KL of policy and teacher at each token [N], with gradient; 0 at tokens without scores.

    For sampled tokens the estimate is k2, whatever `algorithm.kl_estimator` is, because its gradient is the KL's own.
    """
    scores = micro.teacher
    assert scores is not None
    if policy.likeliest is None:
        distance = reference_kl(tokens.logprobs, scores.logprobs, "k2")
    else:
        distance = coarse_kl(policy.likeliest, scores.logprobs)
    return torch.where(scores.scored, distance, 0.0)


def _compare(
    micro: MicroBatch, logprobs: torch.Tensor, old: torch.Tensor, position: TrainPosition, stats: Stats
) -> None:
    """Report how far the interpolated, the current and the generating policy are from the recomputed proximal one."""
    guess = interpolated_logprobs(micro, logprobs, position)
    stats.mean("proximal/error", (guess - old).abs(), over="tokens")
    stats.mean("proximal/bias", guess - old, over="tokens")
    stats.mean("proximal/moved", (logprobs.detach() - old).abs(), over="tokens")
    stats.mean("proximal/away", (micro.rollout_logprobs - old).abs(), over="tokens")
