"""Normalises the advantages of a batch, against the batch or within each group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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


def normalize_turns(
    raw: Sequence[Sequence[float]], weights: Sequence[Sequence[float]] | None = None, clip: float | None = None
) -> list[list[float]]:
    """`normalize` over all turns of a batch, each of which counts like a sample.

    If every sample has one turn, this is `normalize` of the samples.

    Args:
        raw: return of each turn - v, by sample.
        weights: model tokens of each turn, by sample.
        clip: as in `normalize`.

    Returns:
        The normalised values, in the shape of `raw`.

    Raises:
        ValueError: like `normalize`.
    """
    ends = np.cumsum([len(turns) for turns in raw])[:-1]
    flat = np.concatenate([np.asarray(turns, np.float64) for turns in raw])
    flat_weights = None if weights is None else np.concatenate([np.asarray(turns, np.float64) for turns in weights])
    return [turns.tolist() for turns in np.split(normalize(flat, flat_weights, clip), ends)]


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
