"""The loss of one micro-batch: proximal policy, correction, policy loss and penalties, on its model tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.config import AlgorithmConfig
from learner.aggregation import Denominators, aggregate_tokens
from learner.batch import MicroBatch
from learner.correction import Tally, TokenCorrection, correct_tokens
from learner.losses import PolicyTokens, row_lengths, token_policy_loss
from learner.penalties import reference_kl, without_sure_negatives
from learner.proximal import interpolated


@dataclass(frozen=True, slots=True)
class Moment:
    """Where in the run a micro-batch is trained on.

    Attributes:
        version: of the weights the batch began with, v_old.
        done: share of the batch's optimizer steps taken so far, between 0 and 1.
    """

    version: int
    done: float


@dataclass(frozen=True, slots=True)
class Known:
    """What was computed before the micro-batch is trained on; None: nothing was.

    Attributes:
        old: log pi_old of a recomputed proximal policy [N].
        reference: log pi_ref [N].
        correction: weights and mask, where the weights had to be normalised over all ranks.
    """

    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    correction: TokenCorrection | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """What one micro-batch adds to the optimizer step.

    Attributes:
        loss: divided by the counts before rejection; a tensor with gradient.
        tally: statistics of its tokens.
        parts: policy loss, KL and entropy, divided by the same counts [3].
    """

    loss: torch.Tensor
    tally: Tally
    parts: torch.Tensor


def proximal_logprobs(
    micro: MicroBatch, logprobs: torch.Tensor, old: torch.Tensor | None, moment: Moment, config: AlgorithmConfig
) -> torch.Tensor:
    """log pi_old [N]; `old` is the recomputed one, None before the batch's first step, when it is the current."""
    if config.proximal == "rollout":
        return micro.rollout_logprobs
    if config.proximal == "interpolate":
        current = moment.version + moment.done
        return interpolated(logprobs, micro.rollout_logprobs, micro.versions, moment.version, current)
    return logprobs.detach() if old is None else old


def corrected(
    micro: MicroBatch, logprobs: torch.Tensor, old: torch.Tensor, moment: Moment, config: AlgorithmConfig
) -> TokenCorrection:
    """The correction of the gap to the generating policy; in bypass mode the gap of the current policy."""
    ours = logprobs.detach() if config.proximal == "rollout" else old
    ages = (moment.version - micro.versions).clamp(min=0)
    return correct_tokens(ours, micro.rollout_logprobs, micro.layout, config.correction, ages)


def objective(
    micro: MicroBatch,
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
    known: Known,
    moment: Moment,
    denominators: Denominators,
    config: AlgorithmConfig,
) -> Objective:
    """The loss of a micro-batch and its statistics.

    Args:
        logprobs, entropies: of the policy that is trained, with gradient [N].
        denominators: counts of the optimizer step's model tokens and rows, before any rejection.
    """
    old = proximal_logprobs(micro, logprobs, known.old, moment, config)
    correction = known.correction or corrected(micro, logprobs, old, moment, config)
    tally = Tally()
    tally.merge(correction.tally)
    keep = without_sure_negatives(correction.keep, old, micro.advantages, config.negative_max_prob)
    tokens = PolicyTokens.of(logprobs, old, micro.rollout_logprobs, micro.advantages, keep, micro.layout)
    weights = correction.weights if config.weighs_loss else None
    loss, sums = token_policy_loss(config.loss, tokens, weights, config, denominators)
    lengths = row_lengths(keep, micro.layout, config)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return aggregate_tokens(values, keep, micro.layout, config.aggregation, denominators, lengths)

    parts = {"policy": loss.detach(), "kl": loss.new_zeros(()), "entropy": loss.new_zeros(())}
    if config.entropy_coef:
        entropy = mean(torch.where(keep, entropies, 0.0))
        loss, parts["entropy"] = loss - config.entropy_coef * entropy, entropy.detach()
    if known.reference is not None:
        reference = torch.where(keep, known.reference, 0.0)
        kl = mean(reference_kl(tokens.logprobs, reference, config.kl_estimator))
        loss, parts["kl"] = loss + config.kl_coef * kl, kl.detach()
    tally.add(**{"actor/entropy": torch.where(keep, entropies.detach(), 0.0)})
    tally.add(**sums)
    tally.add(
        learned_tokens=keep,
        learned_rows=micro.layout.segment_sum(keep.long()) > 0,
        negative_filtered=correction.keep & ~keep,
    )
    if config.proximal == "compare":
        _compare(tally, micro, logprobs, old, moment)
    return Objective(loss, tally, torch.stack([*parts.values()]).double())


def _compare(tally: Tally, micro: MicroBatch, logprobs: torch.Tensor, old: torch.Tensor, moment: Moment) -> None:
    """How far the interpolated proximal policy is from the recomputed one, beside how far the current policy is."""
    guess = interpolated(logprobs, micro.rollout_logprobs, micro.versions, moment.version, moment.version + moment.done)
    tally.add(
        proximal_error=(guess - old).abs(),
        proximal_bias=guess - old,
        proximal_moved=(logprobs.detach() - old).abs(),
        proximal_away=(micro.rollout_logprobs - old).abs(),
    )
