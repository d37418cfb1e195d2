"""The value tracker: the reward expected from the current policy on each prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from common.answers import in_range
from common.config import SelectionConfig, TrackerConfig
from sampler.values.kinds import PRIOR, load_kind
from sampler.values.population import Population, PromptTraits
from sampler.values.selection import draw, load_criterion, selection_weights

# The selection weights of a large pool of N prompts are recomputed after every N / REFRESH_PART rewards.
REFRESH_PART = 16
SMALL_POOL = 4096


class Counts(NamedTuple):
    """The counts of one prompt.

    Attributes:
        alpha, beta: counts of the Beta distribution.
        prior: what is left of the initial count in each of the two.
        visits: rewards counted.
        retired: whether the prompt is never selected again.
    """

    alpha: float
    beta: float
    prior: float
    visits: int
    retired: bool


class Visit(NamedTuple):
    """What the tracker did with one reward; the metrics are the means of these between two batches.

    Attributes:
        drift_mean, rho_mean: D and the forgetting factor.
        n_eff_mean: alpha + beta after the reward was counted.
        alpha_mean, beta_mean, value_mean: the prompt's counts and value before that.
        rho_clip_ratio: 1 if the factor was raised to `rho_min` or lowered to `rho_max`.
        first_sampled_ratio: 1 if it is the prompt's first response.
    """

    drift_mean: float
    rho_mean: float
    n_eff_mean: float
    alpha_mean: float
    beta_mean: float
    value_mean: float
    rho_clip_ratio: float
    first_sampled_ratio: float


class ValueTracker:
    """Beta counts of every prompt, which forget as the policy moves (SPO, arXiv 2509.13232).

    N_eff = alpha + beta says how much is known. With `prior: paper` the expected reward v is alpha / (alpha + beta);
    with `prior: population` it is the prompt's decayed mean reward, shrunk towards that of all prompts (`Population`).

    Raises:
        ValueError: no prompts, or a prompt id twice.
        UserError: the kind or the criterion is the user's own, and cannot be used.
    """

    def __init__(
        self,
        prompt_ids: Sequence[str],
        config: TrackerConfig,
        selection: SelectionConfig | None = None,
        traits: PromptTraits | None = None,
    ) -> None:
        self.config = config
        self.selection = selection or SelectionConfig()
        self.population = Population(traits or PromptTraits()) if config.has_population else None
        self._kind, self._criterion = load_kind(config), load_criterion(self.selection)
        self.prompt_ids = list(prompt_ids)
        self.index = {prompt_id: i for i, prompt_id in enumerate(self.prompt_ids)}
        if not self.prompt_ids or len(self.index) != len(self.prompt_ids):
            raise ValueError("a tracker needs at least one prompt id, each only once")
        self.alpha = np.full(len(self.prompt_ids), PRIOR)  # [N]
        self.beta = np.full(len(self.prompt_ids), PRIOR)  # [N]
        self.prior = np.full(len(self.prompt_ids), PRIOR)  # [N]
        self.visits = np.zeros(len(self.prompt_ids), np.int64)  # [N]
        self.retired = np.zeros(len(self.prompt_ids), bool)  # [N]
        self._weights = np.empty(0)  # [N], of `draw`
        self._largest: dict[int, float] = {}  # upper bound of a pool's weights, by the index where the pool begins
        self._updates = 0  # since all weights were computed

    def value(self, prompt_id: str) -> float:
        """v, the expected reward in [0, 1]."""
        i = self.index[prompt_id]
        if self.population is not None:
            return self.population.estimate(i, *self._evidence(i))
        return self.alpha.item(i) / (self.alpha.item(i) + self.beta.item(i))

    def values(self) -> np.ndarray:
        """v of all prompts, float64 [N]."""
        if self.population is None:
            return self.alpha / (self.alpha + self.beta)
        successes = self.alpha - self.prior
        return self.population.estimates(successes, successes + self.beta - self.prior)

    def counts(self, prompt_id: str) -> tuple[float, float]:
        """(alpha, beta)."""
        i = self.index[prompt_id]
        return self.alpha.item(i), self.beta.item(i)

    def rho(self, kl: float) -> float:
        """Forgetting factor for a policy that moved by D = `kl`: 2^(-D / half_life), clipped."""
        return min(max(self._raw_rho(kl), self.config.rho_min), self.config.rho_max)

    def is_clipped(self, kl: float) -> bool:
        """Whether the forgetting factor for D = `kl` is one of its bounds instead of 2^(-D / half_life)."""
        return self._raw_rho(kl) != self.rho(kl)

    def _raw_rho(self, kl: float) -> float:
        return float(2.0 ** (-kl / self.config.half_life))

    def rescale(self, reward: float) -> float:
        """Map a reward from the declared range to [0, 1]; raises ValueError outside the range."""
        low, high = self.config.reward_range
        return (in_range(reward, low, high) - low) / (high - low)

    def update(self, prompt_id: str, reward: float, kl: float = 0.0, rho: float | None = None) -> float:
        """Count a reward and return the baseline: v before this reward.

        Args:
            reward: in `config.reward_range`.
            kl: drift D of the policy on this prompt since the previous response to it.
            rho: forgetting factor to use instead of the one that D gives.

        Raises:
            ValueError: the reward is outside the declared range.
            UserError: a kind of the user's own fails.
        """
        reward = self.rescale(reward)
        rho = self.rho(kl) if rho is None else rho
        i = self.index[prompt_id]
        alpha, beta = self.alpha.item(i), self.beta.item(i)
        if self.population is None:
            # A baseline that already contained its own reward would bias the policy gradient.
            baseline = alpha / (alpha + beta)
        else:
            baseline = self.population.learn(i, *self._evidence(i), reward)
        self.alpha[i], self.beta[i] = self._kind(alpha, beta, reward, rho)
        self.prior[i] *= rho
        self.visits[i] += 1
        self._updates += 1
        return baseline

    def initialize(self, scores: Mapping[str, Sequence[float]]) -> None:
        """Start from offline scores: N0 = 1/(1 - rho_min) counts, smoothed by half a success and half a failure.

        Raises:
            ValueError: a score is outside the declared range.
        """
        size = 1 / (1 - self.config.rho_min)
        for prompt_id, prompt_scores in scores.items():
            if not prompt_scores:
                continue
            n, successes = len(prompt_scores), sum(self.rescale(score) for score in prompt_scores)
            i = self.index[prompt_id]
            self.alpha[i] = size * (successes + PRIOR) / (n + 1)
            self.beta[i] = size * (n - successes + PRIOR) / (n + 1)
            self.prior[i] = size * PRIOR / (n + 1)
        self.forget_weights()

    def retire(self, prompt_id: str) -> None:
        """Never select this prompt again."""
        self.retired[self.index[prompt_id]] = True
        if len(self._weights):
            self._weights[self.index[prompt_id]] = 0.0

    def sampling_weights(self, rng: np.random.Generator | None = None) -> np.ndarray:
        """Weight of each prompt in the next draw, float64 [N]; 0 for retired prompts.

        Args:
            rng: for the criterion `thompson`, which draws a success rate for each prompt; a fixed seed by default.
        """
        counts = self.alpha + self.beta
        scores = self._criterion(self.values(), counts, self.visits, rng or np.random.default_rng(0))
        weights = selection_weights(scores, counts, self.selection)
        weights[self.retired] = 0.0
        return weights

    def select(self, n: int, rng: np.random.Generator, exclude: Iterable[str] = ()) -> list[str]:
        """Draw n prompts by their weights, none twice, and none of `exclude` while there are enough others."""
        blocked = np.zeros(len(self.prompt_ids), bool)
        blocked[[self.index[prompt_id] for prompt_id in exclude]] = True
        return [self.prompt_ids[i] for i in self.draw(n, rng, blocked)]

    def draw(
        self,
        n: int,
        rng: np.random.Generator,
        blocked: np.ndarray | None = None,
        pool: tuple[int, int] | None = None,
    ) -> np.ndarray:
        """Select by index, int64 [n]; see `sampler.values.selection.draw`.

        Args:
            blocked: drawn only after all others, bool [N].
            pool: range of prompts to draw from; by default all.
        """
        # Exact for a small pool. For a large one the weights of all prompts would cost more than the samples.
        stale = self._updates * REFRESH_PART > len(self.prompt_ids) or len(self.prompt_ids) <= SMALL_POOL
        if stale or not len(self._weights):
            self._weights = self.sampling_weights(rng)
            self._updates = 0
            self._largest.clear()
        start, end = pool or (0, len(self.prompt_ids))
        weights = self._weights[start:end]
        if start not in self._largest:
            self._largest[start] = float(weights.max())
        within = None if blocked is None else blocked[start:end]
        return start + draw(weights, n, rng, within, self._largest[start])

    def forget_weights(self) -> None:
        """Compute the weights of all prompts again for the next draw, as a new process would."""
        self._weights = np.empty(0)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Ids (UTF-8 bytes), counts, visits and retired prompts, each [N], and the state of the population."""
        ids = np.array([prompt_id.encode() for prompt_id in self.prompt_ids])
        arrays = {name: getattr(self, name).copy() for name in Counts._fields}
        return {"prompt_ids": ids, **arrays} | (self.population.state_dict() if self.population else {})

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the counts of the prompts that `state` has; the others keep theirs."""
        ids = state["prompt_ids"].tolist()
        indices = np.array([self.index.get(prompt_id.decode(), -1) for prompt_id in ids], np.int64)
        in_data = indices >= 0
        self.restore_rows(indices[in_data], {name: state[name][in_data] for name in Counts._fields})
        if self.population is not None:
            self.population.load_state_dict(state)

    def row(self, i: int) -> Counts:
        return Counts(*(getattr(self, name).item(i) for name in Counts._fields))

    def restore_rows(self, indices: np.ndarray, rows: Mapping[str, np.ndarray] | np.ndarray) -> None:
        """Restore many prompts, given their indices, int64 [R], and the fields of `Counts`, [R] each."""
        for name in Counts._fields:
            getattr(self, name)[indices] = rows[name]
        self.forget_weights()

    def _evidence(self, i: int) -> tuple[float, float]:
        """s and n: the decayed sum of the prompt's rewards and their number, without the initial counts."""
        prior = self.prior.item(i)
        successes = self.alpha.item(i) - prior
        return successes, successes + self.beta.item(i) - prior
