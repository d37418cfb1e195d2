"""Advantage, returns and value: of a sample, as the sampler sends them, and of its rows and model tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from common.messages import Batch, InvalidMessage
from common.payload import Payload

# One number for all of a sample's model tokens, or one for each model span, which is a turn of the assistant.
Advantage = float | Sequence[float]


@dataclass(frozen=True, slots=True)
class CriticTarget:
    """A critic's training target for a sample, or for one of its rows.

    Attributes:
        returns: the reward; or for each turn the sum of the rewards from that turn on.
        value: the tracker's value of the prompt.
    """

    returns: Advantage
    value: float


def critic_targets(batch: Batch) -> list[CriticTarget] | None:
    """The critic's target for each sample [B]; None without a critic."""
    if batch.values is None or batch.returns is None:
        return None
    by_turn = batch.turn_advantages is not None
    returns: list[Advantage] = [numbers if by_turn else numbers[0] for numbers in batch.returns]
    return [CriticTarget(*one) for one in zip(returns, batch.values, strict=True)]


def of_rows(payload: Payload, rows: Sequence[Payload], numbers: Advantage, what: str) -> list[Advantage]:
    """Each row's part of a sample's numbers. Raises `InvalidMessage` if there are not as many as turns."""
    if not isinstance(numbers, Sequence):
        return [numbers] * len(rows)
    if len(numbers) != len(payload.model_spans):
        raise InvalidMessage(f"{len(numbers)} {what} for {len(payload.model_spans)} turns")
    of_turns = iter(numbers)
    return [list(islice(of_turns, len(row.model_spans))) for row in rows]


def token_advantages(payload: Payload, advantage: Advantage) -> np.ndarray:
    """The sample's advantage, or that of the token's turn, at each model token, float32 [M]."""
    lengths = payload.model_spans[:, 1] - payload.model_spans[:, 0]
    if not isinstance(advantage, Sequence):
        return np.full(lengths.sum(), advantage, np.float32)
    return np.repeat(np.asarray(advantage, np.float32), lengths)


def token_rewards(payload: Payload, returns: Advantage) -> np.ndarray:
    """The reward at each model token of a row, float64 [M], placed on the last token of the row, or of each turn.

    A turn's reward is its return minus that of the next turn. The last turn of a row gets its whole return, so that
    each row of a sample can be computed without the others.
    """
    lengths = payload.model_spans[:, 1] - payload.model_spans[:, 0]
    rewards, last = np.zeros(lengths.sum()), np.cumsum(lengths) - 1
    if isinstance(returns, Sequence):
        rewards[last] = returns - np.append(returns[1:], 0.0)
    else:
        rewards[-1] = returns
    return rewards


def judged_fields(
    rows: Sequence[Payload], critic: Sequence[CriticTarget], device: torch.device | str
) -> dict[str, torch.Tensor]:
    """The fields `rewards` and `tracked` of a micro-batch."""
    pairs = list(zip(rows, critic, strict=True))
    rewards = np.concatenate([token_rewards(row, target.returns) for row, target in pairs])
    tracked = np.concatenate([np.full(len(row.logprobs), target.value) for row, target in pairs])
    return {"rewards": torch.from_numpy(rewards).to(device), "tracked": torch.from_numpy(tracked).to(device)}
