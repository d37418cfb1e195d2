"""What must be known of all tokens of a mini-batch before its first micro-batch is trained on.

M2PO's mask, and the tokens that `clip_cov` and `kl_cov` choose, depend on all of them. Where a mini-batch is more than
one micro-batch of one rank, this takes a forward pass of its own; the step is then the same however it is packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from common.config import AlgorithmConfig, TeacherConfig
from common.config.losses import spec_of
from learner.batch.teacher import taught_advantages
from learner.batch.tensors import MicroBatch
from learner.correction import second_moment
from learner.correction.ranking import over_all
from learner.losses import PolicyTokens, covariance
from learner.ranks.world import World
from learner.stats import Stats
from learner.step_loss import (
    PolicyOutput,
    Precomputed,
    TrainPosition,
    correct,
    proximal_logprobs,
    sure_negatives,
)


def needs_survey(config: AlgorithmConfig) -> bool:
    """Whether the correction or the loss compares all tokens of a mini-batch."""
    return config.correction.m2_threshold is not None or spec_of(config.loss).compares


@torch.no_grad()
def survey(
    mini_batch: list[MicroBatch],
    precomputed: list[Precomputed],
    position: TrainPosition,
    forward: Callable[[MicroBatch], PolicyOutput],
    config: AlgorithmConfig,
    world: World,
    teacher: TeacherConfig | None = None,
) -> list[Precomputed]:
    """The micro-batches' precomputed values, with verdicts on their tokens; all ranks must call this together."""
    if not needs_survey(config) or (len(mini_batch) == 1 and world.shares == 1):
        return precomputed
    compares = spec_of(config.loss).compares
    logprobs = [
        forward(micro).logprobs if compares or values.old is None else values.old
        for micro, values in zip(mini_batch, precomputed, strict=True)
    ]
    olds = [
        proximal_logprobs(micro, own, values.old, position, config)
        for micro, own, values in zip(mini_batch, logprobs, precomputed, strict=True)
    ]
    if config.correction.m2_threshold is not None:
        corrected = logprobs if config.proximal == "rollout" else olds
        columns = [
            second_moment.columns(nearer, micro.rollout_logprobs, micro.layout)
            for micro, nearer in zip(mini_batch, corrected, strict=True)
        ]
        verdicts = over_all(columns, second_moment.second_moment_mask(config.correction.m2_threshold), world)
        precomputed = [replace(one, m2_keep=keep) for one, keep in zip(precomputed, verdicts, strict=True)]
    if compares:
        columns = [
            _compared(micro, own, old, values, position, config, teacher)
            for micro, own, old, values in zip(mini_batch, logprobs, olds, precomputed, strict=True)
        ]
        verdicts = over_all(columns, covariance.choose(config.loss, config), world)
        precomputed = [replace(one, chosen=chosen) for one, chosen in zip(precomputed, verdicts, strict=True)]
    return precomputed


def _compared(
    micro: MicroBatch,
    logprobs: torch.Tensor,
    old: torch.Tensor,
    values: Precomputed,
    position: TrainPosition,
    config: AlgorithmConfig,
    teacher: TeacherConfig | None,
) -> torch.Tensor:
    """What the loss compares, of the tokens that the correction keeps."""
    correction = correct(micro, logprobs, old, position.version, config, Stats(), values.m2_keep)
    advantages = taught_advantages(micro.advantages, old, micro.teacher, teacher, position.version)
    keep = correction.keep & ~sure_negatives(old, advantages, config.negative_max_prob)
    return covariance.columns(
        PolicyTokens.of(logprobs, old, micro.rollout_logprobs, advantages, keep, micro.layout, config)
    )
