"""Which prompts come next: weighted draws without replacement, fast on pools of millions."""

from __future__ import annotations

import numpy as np

from common.config import SelectionConfig

NOTHING = np.empty(0, np.int64)

# Below this size a key for every prompt costs less than proposing and rejecting.
SMALL_POOL = 4096
PROPOSAL_ROUNDS = 32


def selection_weights(values: np.ndarray, effective: np.ndarray, config: SelectionConfig) -> np.ndarray:
    """sqrt(v(1-v)) / N_eff^gamma + epsilon (SPO, arXiv 2509.13232).

    Args:
        values: v, float [N]; NaN where nothing is known of the prompt, which gives weight 0.
        effective: N_eff, float [N].

    Returns:
        float64 [N].
    """
    weights = np.sqrt(values * (1 - values))
    if config.gamma:
        weights = weights / effective**config.gamma
    return np.nan_to_num(weights + config.epsilon, nan=0.0)


def probabilities(weights: np.ndarray) -> np.ndarray:
    """Probability of being drawn first, float64 [N]; uniform where every weight is 0."""
    total = weights.sum()
    if total == 0:
        return np.full(len(weights), 1 / len(weights))
    return weights / total


def draw(weights: np.ndarray, n: int, rng: np.random.Generator, blocked: np.ndarray = NOTHING) -> np.ndarray:
    """Draw indices one after another, each in proportion to its weight among those still left.

    Blocked indices are drawn only after all others are gone, and an index comes twice only where n is more
    than have a weight. Where every weight is 0 the draw is uniform.

    Args:
        weights: >= 0, float [N].
        blocked: distinct indices, int64 [K].

    Returns:
        int64 [n], in the order drawn. The time taken grows with n, hardly with N, while n is a small part of N.
    """
    taken = np.zeros(len(weights), bool)
    taken[blocked] = True
    largest = weights.max()
    if largest == 0:
        weights = np.ones(len(weights))
        largest = 1.0
    drawn = NOTHING
    if len(weights) > SMALL_POOL and 8 * n <= len(weights) - len(blocked):
        drawn = _propose(weights, largest, n, rng, taken)
    if len(drawn) < n:
        drawn = np.concatenate([drawn, _by_keys(weights, n - len(drawn), rng, taken)])
    if len(drawn) < n:
        taken[blocked] = False
        taken[drawn] = True
        drawn = np.concatenate([drawn, _by_keys(weights, n - len(drawn), rng, taken)])
    if len(drawn) < n:
        return rng.choice(len(weights), n, p=probabilities(weights))
    return drawn


def _propose(weights: np.ndarray, largest: float, n: int, rng: np.random.Generator, taken: np.ndarray) -> np.ndarray:
    """Rejection sampling: uniform proposals, kept with probability weight / largest unless taken already.

    Dropping repeats of independent weighted draws is the same as drawing without replacement. May return
    fewer than n where the weights are very uneven. Marks what it returns in `taken`.
    """
    parts: list[np.ndarray] = []
    missing, accepted_part = n, 0.5
    for _ in range(PROPOSAL_ROUNDS):
        size = int(1.1 * missing / accepted_part) + 32
        proposed = rng.integers(len(weights), size=size)
        kept = proposed[(rng.random(size) * largest < weights[proposed]) & ~taken[proposed]]
        _, first = np.unique(kept, return_index=True)
        fresh = kept[np.sort(first)][:missing]
        taken[fresh] = True
        parts.append(fresh)
        missing -= len(fresh)
        if missing == 0:
            break
        accepted_part = max(len(fresh) / size, 0.01)
    return np.concatenate(parts)


def _by_keys(weights: np.ndarray, n: int, rng: np.random.Generator, taken: np.ndarray) -> np.ndarray:
    """The n smallest of exponential variables with rates `weights` (Efraimidis and Spirakis, 2006)."""
    pool = np.flatnonzero(~taken & (weights > 0))
    keys = rng.standard_exponential(len(pool)) / weights[pool]
    if n < len(pool):
        nearest = np.argpartition(keys, n)[:n]
        pool, keys = pool[nearest], keys[nearest]
    return pool[np.argsort(keys)]
