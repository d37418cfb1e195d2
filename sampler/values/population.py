"""The prequential prior: what a prompt's own rewards are shrunk towards, and how strongly (docs/algorithms.md).

A few answers to a prompt say little about its next reward; the answers to all prompts say more. The baseline is
b = (s + k m) / (n + k), with s and n the prompt's decayed sum of rewards and their number, m a mean of many prompts,
and k the number of rewards that this mean counts for. Every pair of m and k predicts each reward before it is counted.
Rewards are taken in blocks, and a pair is judged by the variance of its errors within blocks, because normalisation
over the batch removes their mean. The pair with the least variance so far is used for the next block. One of the pairs
is the mean of all rewards alone, a constant within a block: so the baseline is hardly ever worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

# k, largest first: while the errors are equal, the mean alone is used.
GRID = np.array([np.inf, 64, 32, 16, 8, 4, 2, 1, 0.5])
BLOCK = 128  # rewards
ERROR_DECAY = 0.5 ** (BLOCK / 512)  # per block
MEAN_DECAY = 1 - 1 / 256
GROUP_DECAY = 1 - 1 / 64
GROUP_PRIOR = 4.0  # rewards that the mean of all rewards counts for in a group's mean
LEARNING_RATE = 0.05  # of the regression on the prompt's features, whose inputs have length 1


class Features:
    """The inputs of a regression on the prompts: a vector of length 1 for each.

    Args:
        name: of the mean that the regression predicts.
        rows: counts, uint8 [N, D], whose square roots are used; or vectors of length 1, float16 [N, D] (zeros if
            nothing is known of the prompt).
    """

    def __init__(self, name: str, rows: np.ndarray) -> None:
        self.name, self.rows = name, rows
        # Squared length of each row's vector of square roots, [N].
        self._squares = np.maximum(rows.sum(1), 1.0) if rows.dtype == np.uint8 else None

    def __getitem__(self, i: int) -> np.ndarray:
        """The vector of the prompt at index i, float64 [D]."""
        if self._squares is None:
            return self.rows[i].astype(np.float64)
        return np.sqrt(self.rows[i] / self._squares.item(i))

    def times(self, weights: np.ndarray) -> np.ndarray:
        """Every prompt's vector times `weights` [D], float32 [N]."""
        weights = weights.astype(np.float32)
        if self._squares is None:
            return self.rows.astype(np.float32) @ weights
        return np.sqrt(self.rows, dtype=np.float32) @ weights / np.sqrt(self._squares)


@dataclass(frozen=True, slots=True)
class PromptTraits:
    """Traits of prompts that are known before they are answered.

    Attributes:
        groups: number of each prompt's group, int64 [N]; None without groups.
        group_names: name of each group, [G].
        features: inputs of the regression; None without one.
    """

    groups: np.ndarray | None = None
    group_names: tuple[str, ...] = ()
    features: Features | None = None


class Population:
    """Estimates each prompt's value from its own rewards and from those of all prompts.

    Attributes:
        total: decayed sum and number of all rewards, float64 [2].
        mean: the mean of `total` when the block began, and the number of rewards counted in the block, float64 [2].
        by_group: decayed sum and number of each group's rewards, float64 [G, 2].
        means: names of the candidates for m, as far as the data allow: `all`, `group`, and that of the features.
        weights: of the regression of r - mean on the prompt's features, float64 [D].
        block: sums of the errors, and of their squares, in the block, for each mean and k, float64 [2, M, K].
        errors: decayed sum over blocks of the squared errors about their mean in the block, float64 [M, K].
    """

    def __init__(self, traits: PromptTraits) -> None:
        self.traits = traits
        self.means = ["all"]
        self.means += ["group"] if traits.groups is not None else []
        self.means += [traits.features.name] if traits.features is not None else []
        self.total = np.zeros(2)
        self.mean = np.array([0.5, 0.0])
        self.by_group = np.zeros((len(traits.group_names), 2))
        self.weights = np.zeros(0 if traits.features is None else traits.features.rows.shape[1])
        self.block = np.zeros((2, len(self.means), len(GRID)))
        self.errors = np.zeros((len(self.means), len(GRID)))
        self._chosen = (0, 0)  # indices of the mean and the k with the least error
        # Rewards that are not part of `block` yet, and what they were predicted from.
        self._counted: list[tuple[list[float], float, float, float]] = []  # m of every mean, s, n, reward

    @property
    def chosen(self) -> tuple[str, float]:
        mean, k = self._chosen
        return self.means[mean], GRID.item(k)

    def estimate(self, i: int, successes: float, trials: float) -> float:
        """b of the prompt at index i, given its s and n."""
        mean, k = self.chosen
        features = self._features(mean)
        deviation = 0.0 if features is None else features[i].dot(self.weights).item()
        return shrunk(self._mean_of(mean, i, deviation), k, successes, trials)

    def estimates(self, successes: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """b of all prompts, float64 [N], given their s and n [N]."""
        mean, k = self.chosen
        prior = self._means_of_all(mean)
        share = counts / (counts + k)
        own = np.divide(successes, counts, out=np.zeros_like(counts), where=counts > 0)
        return np.clip(prior + share * (own - prior), 0.0, 1.0)

    def learn(self, i: int, successes: float, trials: float, reward: float) -> float:
        """Count a reward in [0, 1] of the prompt at index i; returns b as it was before."""
        features = None if self.traits.features is None else self.traits.features[i]
        deviation = 0.0 if features is None else features.dot(self.weights).item()
        means = [self._mean_of(name, i, deviation) for name in self.means]
        mean, k = self._chosen
        baseline = shrunk(means[mean], GRID.item(k), successes, trials)
        self._counted.append((means, successes, trials, reward))
        total, number = self.total.tolist()
        if features is not None:
            self.weights += LEARNING_RATE * (reward - (total / number if number else 0.5) - deviation) * features
        if self.traits.groups is not None:
            group = self.traits.groups.item(i)
            group_total, group_number = self.by_group[group].tolist()
            self.by_group[group] = group_total * GROUP_DECAY + reward, group_number * GROUP_DECAY + 1.0
        self.total[0], self.total[1] = total * MEAN_DECAY + reward, number * MEAN_DECAY + 1.0
        self.mean[1] += 1
        if self.mean[1] == BLOCK:
            self._end_block()
        return baseline

    def pack(self) -> bytes:
        return np.concatenate([part.ravel() for part in self._parts()]).tobytes()

    def unpack(self, data: bytes) -> None:
        """Restore the state that `pack` returned; that of a run with other groups or means is ignored."""
        parts, values = self._parts(), np.frombuffer(data, np.float64)
        *starts, end = np.cumsum([part.size for part in parts])
        if len(values) != end:
            return
        for part, restored in zip(parts, np.split(values, starts), strict=True):
            part[...] = restored.reshape(part.shape)
        self._choose()

    def state_dict(self) -> dict[str, np.ndarray]:
        """The state as arrays, with the names of groups and means (UTF-8 bytes)."""
        self._add_errors()
        return {
            "population_total": self.total.copy(),
            "population_mean": self.mean.copy(),
            "population_groups": self.by_group.copy(),
            "population_group_names": np.array([name.encode() for name in self.traits.group_names], np.bytes_),
            "population_weights": self.weights.copy(),
            "population_block": self.block.copy(),
            "population_errors": self.errors.copy(),
            "population_means": np.array([name.encode() for name in self.means]),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what still fits: groups by name, the regression if it has the same inputs."""
        self._add_errors()
        if "population_total" not in state:
            return
        self.total[:], self.mean[:] = state["population_total"], state["population_mean"]
        names, groups = state["population_group_names"], state["population_groups"]
        rows = {name.decode(): row for name, row in zip(names, groups, strict=True)}
        for g, name in enumerate(self.traits.group_names):
            self.by_group[g] = rows.get(name, 0.0)
        if state["population_weights"].shape == self.weights.shape:
            self.weights[:] = state["population_weights"]
        means = [name.decode() for name in state["population_means"].tolist()]
        if means == self.means and state["population_errors"].shape == self.errors.shape:
            self.errors[:], self.block[:] = state["population_errors"], state["population_block"]
            self._choose()

    def _choose(self) -> None:
        self._chosen = divmod(int(self.errors.argmin()), len(GRID))

    def _add_errors(self) -> None:
        """Add the errors of the rewards counted since the last call to `block`, in their order."""
        if not self._counted:
            return
        means, *columns = map(np.array, zip(*self._counted, strict=True))
        self._counted.clear()
        successes, counts, rewards = (column[:, None, None] for column in columns)  # [n, 1, 1] each
        prior = means[:, :, None]  # [n, M, 1]
        own = np.divide(successes, counts, out=np.zeros_like(counts), where=counts > 0)
        errors = rewards - (prior + counts / (counts + GRID) * (own - prior))  # [n, M, K]
        # Sums in the order of the rewards, so that they do not depend on how many are added at once.
        for part, added in zip(self.block, (errors, errors * errors), strict=True):
            part[:] = np.concatenate([part[None], added]).cumsum(0)[-1]

    def _end_block(self) -> None:
        self._add_errors()
        total, squares = self.block
        self.errors *= ERROR_DECAY
        self.errors += squares - total**2 / BLOCK
        self.block[:] = 0.0
        self.mean[:] = self.total[0] / self.total[1], 0.0
        self._choose()

    def _parts(self) -> tuple[np.ndarray, ...]:
        self._add_errors()
        return self.total, self.mean, self.by_group, self.weights, self.block, self.errors

    def _features(self, mean: str) -> Features | None:
        """The features that a mean is predicted from; None if it does not depend on features."""
        features = self.traits.features
        return features if features is not None and features.name == mean else None

    def _mean_of(self, name: str, i: int, deviation: float) -> float:
        """m of the prompt at index i, given the deviation that the regression on its features predicts."""
        mean = self.mean.item(0)
        if name == "group":
            assert self.traits.groups is not None
            total, number = self.by_group[self.traits.groups.item(i)].tolist()
            return (total + GROUP_PRIOR * mean) / (number + GROUP_PRIOR)
        return mean if self._features(name) is None else min(max(mean + deviation, 0.0), 1.0)

    def _means_of_all(self, name: str) -> np.ndarray:
        """m of every prompt, float64 [N] or [1]."""
        mean = self.mean.item(0)
        if name == "group":
            assert self.traits.groups is not None
            return ((self.by_group[:, 0] + GROUP_PRIOR * mean) / (self.by_group[:, 1] + GROUP_PRIOR))[
                self.traits.groups
            ]
        if features := self._features(name):
            return np.clip(mean + features.times(self.weights), 0.0, 1.0)
        return np.array([mean])


def shrunk(mean: float, k: float, successes: float, trials: float) -> float:
    """b = (s + k m) / (n + k)."""
    return mean + trials / (trials + k) * (successes / trials - mean) if trials else mean
