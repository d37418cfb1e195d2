"""Advantages of a batch: normalised against the batch or within each group, or by a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from common.config import AdvantageConfig, AlgorithmConfig
from common.parts import ADVANTAGE

# Advantages [n] of the samples of a batch (or of their turns), group after group, from arrays of the same length: the
# rewards, their baselines, the numbers of their groups, and their numbers of model tokens.
Advantage = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]

EPSILON = 1e-8
GROUP_EPSILON = 1e-6  # added to a group's standard deviation, as verl does


def normalize(raw: np.ndarray, weights: np.ndarray | None = None, clip: float | None = None) -> np.ndarray:
    """z-score of the advantages of a batch.

    Args:
        raw: r - v, float [B].
        weights: model tokens of each sample, [B]; mean and standard deviation are then taken over tokens, which
            matches a token-mean loss (SPO++, arXiv 2608.24870). By default each sample counts the same, with the
            sample standard deviation.
        clip: bound of the results, [-clip, clip]; None for no clipping.

    Returns:
        float64 [B]; zeros for a batch of one, for equal values, or with fewer than two weights above 0.

    Raises:
        ValueError: shapes differ, a value is not finite, or a weight is negative.
    """
    raw = np.asarray(raw, np.float64)
    if raw.ndim != 1 or not np.isfinite(raw).all():
        raise ValueError(f"raw advantages must be finite numbers [B], got shape {raw.shape}")
    if len(raw) < 2 or np.ptp(raw) == 0:
        return np.zeros_like(raw)
    if weights is None:
        return _clipped((raw - raw.mean()) / (raw.std(ddof=1) + EPSILON), clip)
    weights = np.asarray(weights, np.float64)
    if weights.shape != raw.shape or not np.isfinite(weights).all() or np.any(weights < 0):
        raise ValueError(f"weights must be numbers >= 0 of shape {raw.shape}, got shape {weights.shape}")
    if np.count_nonzero(weights) < 2:
        return np.zeros_like(raw)
    mean = np.average(raw, weights=weights)
    std = np.sqrt(np.average((raw - mean) ** 2, weights=weights))
    return _clipped((raw - mean) / (std + EPSILON), clip)


def _clipped(values: np.ndarray, clip: float | None) -> np.ndarray:
    return values if clip is None else values.clip(-clip, clip)


def group_relative(rewards: np.ndarray, *, std: bool = True) -> np.ndarray:
    """Rewards minus their group's mean, divided by its standard deviation (GRPO, arXiv 2402.03300, section 4.1).

    Args:
        rewards: float [G, n], one group per row.
        std: divide by the standard deviation; Dr. GRPO does not (arXiv 2503.20783).

    Returns:
        float64 [G, n]; zeros for a group of equal rewards.
    """
    rewards = np.asarray(rewards, np.float64)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    if std:
        centred /= rewards.std(axis=1, ddof=1, keepdims=True) + GROUP_EPSILON
    return np.where(np.ptp(rewards, axis=1, keepdims=True) == 0, 0.0, centred)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Rewards minus the mean of the other rewards in their group (RLOO, arXiv 2402.14740).

    As in verl and, by default, in TRL, the batch is not normalised.

    Args:
        rewards: float [G, n], one group of n >= 2 per row.

    Returns:
        float64 [G, n]; zeros for a group of equal rewards.
    """
    n = np.shape(rewards)[1]
    return group_relative(rewards, std=False) * n / (n - 1)


def methods(settings: AdvantageConfig) -> dict[str, Advantage]:
    """SPO's own advantages, by `algorithm.method`."""
    z_scored = partial(z_score, token_weighted=settings.token_weighted, clip=settings.clip)
    return {
        "spo": z_scored,
        "none": z_scored,
        "grpo": partial(in_groups, group_relative),
        "dr_grpo": partial(in_groups, partial(group_relative, std=False)),
        "rloo": partial(in_groups, leave_one_out),
    }


def z_score(
    rewards: np.ndarray, baselines: np.ndarray, groups: np.ndarray, tokens: np.ndarray, *,
    token_weighted: bool = False, clip: float | None = None,
) -> np.ndarray:  # fmt: skip
    """`normalize` of rewards minus baselines."""
    return normalize(rewards - baselines, tokens if token_weighted else None, clip)


def in_groups(
    compare: Callable[[np.ndarray], np.ndarray], rewards: np.ndarray, baselines: np.ndarray, groups: np.ndarray,
    tokens: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Apply `compare` to the rewards as [G, n / G]: G groups of equal size lie one after another. Returns [n]."""
    return compare(rewards.reshape(groups[-1] + 1, -1)).ravel()


def load_advantage(algorithm: AlgorithmConfig, settings: AdvantageConfig) -> Advantage:
    """The advantage that `algorithm.method` implies, or the user's own, tried on two made-up batches.

    Raises:
        UserError: it cannot be found, or does not return a finite number for each sample.
    """
    name, table = algorithm.advantage or algorithm.method, methods(settings)
    own = ADVANTAGE.load(name, table, algorithm.advantage_options)
    if name in table:
        return own

    def advantage(rewards: np.ndarray, *columns: np.ndarray) -> np.ndarray:
        return ADVANTAGE.array(name, own(rewards.copy(), *columns), rewards.shape)

    groups = np.repeat(np.arange(4), algorithm.responses)
    # The second batch has equal rewards, where a division by their deviation fails.
    for rewards in (np.arange(len(groups)) % 3 / 2, np.ones(len(groups))):
        advantage(rewards, np.full(len(groups), 0.5), groups, 10 + groups)
    return advantage
