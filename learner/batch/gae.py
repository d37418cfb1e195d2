"""Advantages and returns of the model's tokens, from rewards and a critic's values (GAE, arXiv 1506.02438).

A step goes from one token that the model sampled to the next one of its row: what tools and users wrote between the two
is part of the state, not a step (SAO, arXiv 2607.07508). All tensors hold model tokens alone, row after row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from learner.ranks.world import World

EPSILON = 1e-8


def gae(rewards: torch.Tensor, values: torch.Tensor, segment_ids: torch.Tensor, lambda_: float) -> torch.Tensor:
    """Generalised advantage estimates, float64 [N].

    A_t = d_t + lambda A_(t+1), d_t = r_t + V_(t+1) - V_t; after a row's last token both V and A are 0.

    Args:
        rewards: r, at the token that earned it [N].
        values: V, of the state in which each token was sampled [N].
        segment_ids: row of each token, ascending int64 [N].
    """
    rewards, values = rewards.double(), values.double()
    estimates = rewards - values + _later(values, segment_ids, 1)
    # Each pass doubles the number of terms that are summed, so log2(N) passes suffice.
    distance, decay = 1, lambda_
    while distance < len(estimates) and decay:
        estimates = estimates + decay * _later(estimates, segment_ids, distance)
        distance, decay = 2 * distance, decay * decay
    return estimates


def _later(numbers: torch.Tensor, segment_ids: torch.Tensor, distance: int) -> torch.Tensor:
    """The value `distance` tokens later in the same row, 0 past its end [N]."""
    later = torch.zeros_like(numbers)
    later[:-distance] = torch.where(segment_ids[distance:] == segment_ids[:-distance], numbers[distance:], 0.0)
    return later


def returns(rewards: torch.Tensor, values: torch.Tensor, segment_ids: torch.Tensor, lambda_: float) -> torch.Tensor:
    """The critic's targets: V + A of `gae`, float64 [N]; with lambda 1 the sum of the future rewards."""
    return values.double() + gae(rewards, values, segment_ids, lambda_)


def normalised(advantages: Sequence[torch.Tensor], world: World, clip: float | None = None) -> list[torch.Tensor]:
    """z-score over all model tokens of a batch, on all ranks; all ranks must call this together.

    Args:
        advantages: of each micro-batch of this rank [N].
        clip: results are clipped to [-clip, clip]; None disables clipping.

    Returns:
        float32 [N] of each micro-batch; zeros if all values are equal, or there are fewer than two.
    """
    own = torch.cat([values.double() for values in advantages])
    count, total = world.sum_over_shares([float(len(own)), float(own.sum())])
    mean = total / max(count, 1.0)
    (squares,) = world.sum_over_shares([float((own - mean).square().sum())])
    deviation = (squares / max(count - 1.0, 1.0)) ** 0.5
    # The deviation of equal values consists of rounding errors, and dividing by it would amplify them.
    if deviation <= EPSILON:
        return [torch.zeros_like(values, dtype=torch.float32) for values in advantages]
    scores = [(values - mean) / (deviation + EPSILON) for values in advantages]
    return [(one if clip is None else one.clamp(-clip, clip)).float() for one in scores]
