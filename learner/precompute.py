"""Computations before a micro-batch is trained on: for the whole batch, and for each of its mini-batches.

`precompute` needs the weights from before the batch. `compare_all` needs those from before the mini-batch: M2PO's mask,
and the tokens that `clip_cov` and `kl_cov` choose, depend on all of its tokens. If a mini-batch has several
micro-batches or ranks, this takes a separate forward pass, so that the step does not depend on packing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from common.config import AlgorithmConfig, TeacherConfig
from common.config.losses import spec_of
from learner.batch.tensors import MicroBatch, RolloutBatch
from learner.correction import BATCH_NORM_FACTOR, second_moment, weight_divisor
from learner.correction.engine import correct_tokens
from learner.correction.ranking import over_all
from learner.losses import covariance
from learner.losses.aggregation import Denominators
from learner.ranks.world import World
from learner.stats import Stats
from learner.step_loss import (
    PolicyOutput,
    Precomputed,
    TrainPosition,
    corrected_logprobs,
    loss_input,
    proximal_logprobs,
)

Forward = Callable[[MicroBatch], PolicyOutput]
Score = Callable[[MicroBatch], torch.Tensor]


@torch.no_grad()
def precompute(
    batch: RolloutBatch, forward: Forward, reference: Score | None, config: AlgorithmConfig, world: World
) -> list[list[Precomputed]]:
    """Compute what needs the weights from before the batch, by mini-batch and micro-batch; all ranks together.

    The first mini-batch needs no recomputed policy: its training pass has the same weights.

    Args:
        reference: log pi_ref of a micro-batch's model tokens [N]; None without a KL penalty.
    """
    recomputes = config.proximal in ("recompute", "compare")
    precomputed = [
        [
            Precomputed(
                old=forward(micro).logprobs if recomputes and number else None,
                reference=reference(micro) if reference else None,
            )
            for micro in mini_batch
        ]
        for number, mini_batch in enumerate(batch.mini_batches)
    ]
    if not config.correction.rollout_is_batch_normalize:
        return precomputed
    mean = _weight_mean(batch, precomputed, forward, config, world)
    return [[replace(values, weight_mean=mean) for values in mini_batch] for mini_batch in precomputed]


def _weight_mean(
    batch: RolloutBatch, precomputed: list[list[Precomputed]], forward: Forward, config: AlgorithmConfig, world: World
) -> float:
    """Mean of the batch's importance weights over all ranks at its start.

    It takes a forward pass over mini-batches without recomputed log-probs: the first, or all of them.
    """
    stats, start = Stats(), TrainPosition(batch.version, 0, 1, Denominators(1.0, 1.0, 1.0))
    for mini_batch, mini_batch_values in zip(batch.mini_batches, precomputed, strict=True):
        for micro, values in zip(mini_batch, mini_batch_values, strict=True):
            logprobs = forward(micro).logprobs if values.old is None else values.old
            old = proximal_logprobs(micro, logprobs, values.old, start, config)
            corrected, ages = corrected_logprobs(logprobs, old, config), micro.ages(batch.version)
            correct_tokens(corrected, micro.rollout_logprobs, micro.layout, config.correction, stats, ages)
    return weight_divisor(stats.reduce(world, [BATCH_NORM_FACTOR]))


@torch.no_grad()
def compare_all(
    mini_batch: list[MicroBatch],
    precomputed: list[Precomputed],
    position: TrainPosition,
    forward: Forward,
    config: AlgorithmConfig,
    world: World,
    teacher: TeacherConfig | None = None,
) -> list[Precomputed]:
    """The precomputed values of a mini-batch, with the decisions of correction and loss that compare all of its tokens.

    All ranks must call this together. Nothing changes if neither compares tokens.
    """
    compares, m2_threshold = spec_of(config.loss).compares, config.correction.m2_threshold
    if (not compares and m2_threshold is None) or (len(mini_batch) == 1 and world.shares == 1):
        return precomputed
    logprobs = [
        forward(micro).logprobs if compares or values.old is None else values.old
        for micro, values in zip(mini_batch, precomputed, strict=True)
    ]
    olds = [
        proximal_logprobs(micro, own, values.old, position, config)
        for micro, own, values in zip(mini_batch, logprobs, precomputed, strict=True)
    ]
    if m2_threshold is not None:
        columns = [
            second_moment.columns(corrected_logprobs(own, old, config), micro.rollout_logprobs, micro.layout)
            for micro, own, old in zip(mini_batch, logprobs, olds, strict=True)
        ]
        verdicts = over_all(columns, partial(second_moment.second_moment_mask, m2_threshold), world)
        precomputed = [replace(one, m2_keep=keep) for one, keep in zip(precomputed, verdicts, strict=True)]
    if compares:
        columns = [
            covariance.columns(loss_input(micro, own, old, values, position, config, Stats(), teacher)[1])
            for micro, own, old, values in zip(mini_batch, logprobs, olds, precomputed, strict=True)
        ]
        verdicts = over_all(columns, partial(covariance.choose, config.loss, config), world)
        precomputed = [replace(one, chosen=chosen) for one, chosen in zip(precomputed, verdicts, strict=True)]
    return precomputed
