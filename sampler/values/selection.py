"""Draws of the next prompts: weighted, without replacement, fast on pools of millions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from common.config import SelectionConfig
from common.errors import UserError
from common.parts import CRITERION

# How much there is to learn from each prompt, float64 [N], from columns of the tracker, [N] each: the values v, the
# counts N_eff and the number of rewards; and random numbers.
Criterion = Callable[[np.ndarray, np.ndarray, np.ndarray, np.random.Generator], np.ndarray]

NOTHING = np.empty(0, np.int64)

# Below this size a key for every prompt costs less than proposing and rejecting.
SMALL_POOL = 4096
PROPOSAL_ROUNDS = 32
SMALLEST = 1e-3  # count of a Beta distribution


def selection_weights(scores: np.ndarray, counts: np.ndarray, config: SelectionConfig) -> np.ndarray:
    """score / N_eff^gamma + epsilon (SPO, arXiv 2509.13232, where the score is the spread sqrt(v(1-v))).

    Args:
        scores: of the criterion, float [N]; NaN for a prompt of which nothing is known, which gets weight 0.
        counts: N_eff, float [N].

    Returns:
        float64 [N].
    """
    if config.gamma:
        scores = scores / counts**config.gamma
    return np.nan_to_num(scores + config.epsilon, nan=0.0)


def load_criterion(config: SelectionConfig) -> Criterion:
    """The criterion, which scores all prompts; the user's own is first tried on a few made-up ones.

    Raises:
        UserError: it cannot be found, or does not return finite numbers >= 0, [N].
    """
    own = CRITERION.load(config.criterion, CRITERIA, config.criterion_options)
    if config.criterion in CRITERIA:
        return own

    def criterion(values: np.ndarray, *columns: Any) -> np.ndarray:
        scores = CRITERION.array(config.criterion, own(values.copy(), *columns), values.shape)
        if np.any(scores < 0):
            raise UserError(f"{CRITERION.key} = {config.criterion!r} returned {scores.min():g}; scores must be >= 0")
        return scores

    criterion(
        np.array([0.5, 0.0, 1.0, 0.2]),
        np.array([1.0, 8.0, 9.5, 25.0]),
        np.array([0, 9, 4, 99]),
        np.random.default_rng(0),
    )
    return criterion


def std(values: np.ndarray, counts: np.ndarray, visits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """sqrt(v(1-v)), the standard deviation of a reward that is 0 or 1."""
    return np.sqrt(values * (1 - values))


def uniform(values: np.ndarray, counts: np.ndarray, visits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """1 for every prompt: with `gamma` 0, all are drawn equally often."""
    return np.ones_like(values)


def thompson(values: np.ndarray, counts: np.ndarray, visits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """sqrt(p(1-p)) of a success rate p drawn from Beta(v N_eff, (1-v) N_eff)."""
    drawn = rng.beta(*_beta(values, counts))
    return np.sqrt(drawn * (1 - drawn))


def posterior(values: np.ndarray, counts: np.ndarray, visits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The expectation of sqrt(p(1-p)) for p from Beta(alpha, beta): B(alpha + 1/2, beta + 1/2) / B(alpha, beta)."""
    alpha, beta = _beta(values, counts)
    return _half_step(alpha) * _half_step(beta) / (alpha + beta)


CRITERIA: dict[str, Criterion] = {"std": std, "uniform": uniform, "thompson": thompson, "posterior": posterior}


def _beta(values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.maximum(values * counts, SMALLEST), np.maximum((1 - values) * counts, SMALLEST)


def _half_step(x: np.ndarray) -> np.ndarray:
    """Gamma(x + 1/2) / Gamma(x) for x > 0, to a relative error below 1e-9."""
    # The asymptotic series holds for large arguments; Gamma(x + 1) = x Gamma(x) leads there.
    factor = np.ones_like(x)
    x = x.copy()
    for _ in range(8):
        small = x < 8
        factor = np.where(small, factor * x / (x + 0.5), factor)
        x = np.where(small, x + 1, x)
    series = 1 - 1 / (8 * x) + 1 / (128 * x**2) + 5 / (1024 * x**3) - 21 / (32768 * x**4) - 399 / (262144 * x**5)
    return factor * np.sqrt(x) * series


def probabilities(weights: np.ndarray) -> np.ndarray:
    """Probability of being drawn first, float64 [N]; uniform if every weight is 0."""
    total = weights.sum()
    if total == 0:
        return np.full(len(weights), 1 / len(weights))
    return weights / total


def draw(
    weights: np.ndarray,
    n: int,
    rng: np.random.Generator,
    blocked: np.ndarray | None = None,
    largest: float | None = None,
) -> np.ndarray:
    """Draw indices one after another, each in proportion to its weight among those still left.

    Blocked indices are drawn only after all others, and an index is drawn twice only if n is more than the number of
    positive weights. If every weight is 0 the draw is uniform.

    Args:
        weights: >= 0, float [N].
        blocked: bool [N].
        largest: upper bound of the weights; by default their maximum.

    Returns:
        int64 [n], in the order drawn. If n is a small part of N and `largest` is given, the time grows with n, not N.
    """
    largest = float(weights.max()) if largest is None else largest
    if largest == 0:
        weights = np.ones(len(weights))
        largest = 1.0
    drawn = NOTHING
    if len(weights) > SMALL_POOL and 8 * n <= len(weights):
        drawn = _propose(weights, largest, n, rng, blocked)
    for avoided in (blocked, None):
        if len(drawn) < n:
            taken = np.zeros(len(weights), bool) if avoided is None else avoided.copy()
            taken[drawn] = True
            drawn = np.concatenate([drawn, _by_keys(weights, n - len(drawn), rng, taken)])
    if len(drawn) < n:
        # There are fewer positive weights than draws, so repeats cannot be avoided.
        return rng.choice(len(weights), n, p=probabilities(weights))
    return drawn


def _propose(
    weights: np.ndarray, largest: float, n: int, rng: np.random.Generator, blocked: np.ndarray | None
) -> np.ndarray:
    """Rejection sampling: uniform proposals, kept with probability weight / largest unless blocked or drawn before.

    Dropping repeats of independent weighted draws is the same as drawing without replacement. May return
    fewer than n if the weights are very uneven, or nearly all are blocked.
    """
    drawn = NOTHING
    # A first guess; every round measures the share of proposals that are kept.
    accepted_part = 0.5
    for _ in range(PROPOSAL_ROUNDS):
        missing = n - len(drawn)
        size = int(1.1 * missing / accepted_part) + 32
        proposed = rng.integers(len(weights), size=size)
        kept = proposed[rng.random(size) * largest < weights[proposed]]
        if blocked is not None:
            kept = kept[~blocked[kept]]
        _, first = np.unique(kept, return_index=True)
        fresh = kept[np.sort(first)]
        fresh = fresh[~np.isin(fresh, drawn)][:missing]
        drawn = np.concatenate([drawn, fresh])
        if len(drawn) == n:
            break
        accepted_part = max(len(fresh) / size, 0.01)
    return drawn


def _by_keys(weights: np.ndarray, n: int, rng: np.random.Generator, taken: np.ndarray) -> np.ndarray:
    """The n smallest of exponential variables with rates `weights` (Efraimidis and Spirakis, 2006)."""
    pool = np.flatnonzero(~taken & (weights > 0))
    keys = rng.standard_exponential(len(pool)) / weights[pool]
    if n < len(pool):
        nearest = np.argpartition(keys, n)[:n]
        pool, keys = pool[nearest], keys[nearest]
    return pool[np.argsort(keys)]
