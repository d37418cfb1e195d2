"""The evaluations of a run: accuracy with its band, how it changed, and the prompts whose reward changed most."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from launcher.folder.episodes import EpisodeIndex, read_line
from launcher.folder.statistics import Band, bootstrap

PAIRS = 5  # prompts shown whose reward rose most, and as many whose reward fell most


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A complete evaluation, without tasks that failed on every attempt; the run's own accuracy excludes them too."""

    version: int
    rows: np.ndarray  # rows of the index, `ROW` [N], sorted by prompt and within a prompt in the order of the file
    prompts: np.ndarray  # hash of each prompt's id, ascending [P]
    accuracies: np.ndarray  # share of each prompt's responses that are right [P]
    rewards: np.ndarray  # mean reward of each prompt's responses [P]

    def accuracy(self) -> Band:
        """The mean over the prompts, with its band."""
        return _band(self.accuracies.tobytes())

    def reward(self) -> Band:
        """The mean reward over the prompts, with its band."""
        return _band(self.rewards.tobytes())

    def typical(self, prompt: int) -> np.void:
        """The response to a prompt whose reward is nearest to the mean of its responses; the first of several."""
        own = self.rows[self.rows["prompt"] == prompt]
        return own[np.abs(own["reward"] - own["reward"].mean()).argmin()]


def evaluations(index: EpisodeIndex, right_from: float) -> list[Evaluation]:
    rows = index.evaluated()
    return [_evaluation(int(version), rows[rows["step"] == version], right_from) for version in np.unique(rows["step"])]


def _evaluation(version: int, rows: np.ndarray, right_from: float) -> Evaluation:
    rows = rows[np.argsort(rows["prompt"], kind="stable")]
    prompts, places = np.unique(rows["prompt"], return_inverse=True)
    counts = np.bincount(places)
    accuracies = np.bincount(places, rows["reward"] >= right_from) / counts
    return Evaluation(version, rows, prompts, accuracies, np.bincount(places, rows["reward"]) / counts)


def has_partial_rewards(evaluated: list[Evaluation]) -> bool:
    """Whether the mean reward differs from accuracy, because rewards are not only 0 and 1."""
    return any(not np.array_equal(evaluation.accuracies, evaluation.rewards) for evaluation in evaluated)


@lru_cache(512)
def _band(values: bytes) -> Band:
    """The band of float64 values; cached, since a live page asks for the same bands again and again."""
    return bootstrap(np.frombuffer(values))


@dataclass(frozen=True, slots=True)
class Improvement:
    """Accuracy of the first and the last evaluation, on the prompts that both have."""

    first: int
    last: int
    before: Band
    after: Band
    change: Band  # of the differences prompt by prompt
    prompts: int
    better: int  # number of prompts on which accuracy rose
    worse: int  # number of prompts on which it fell


def improvement(evaluated: list[Evaluation]) -> Improvement | None:
    """The change from the first to the last evaluation; None if there are no two evaluations of the same prompts."""
    if len(evaluated) < 2:
        return None
    first, last = evaluated[0], evaluated[-1]
    both, at_first, at_last = np.intersect1d(first.prompts, last.prompts, return_indices=True)
    if not len(both):
        return None
    before, after = first.accuracies[at_first], last.accuracies[at_last]
    return Improvement(
        first=first.version,
        last=last.version,
        before=_band(before.tobytes()),
        after=_band(after.tobytes()),
        change=_band((after - before).tobytes()),
        prompts=len(both),
        better=int((after > before).sum()),
        worse=int((after < before).sum()),
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """A held-out prompt with its mean reward at two versions, and the row of a typical response at each."""

    prompt_id: str
    rewards: tuple[float, float]
    before: np.void
    after: np.void


def pairs(index: EpisodeIndex, first: Evaluation, last: Evaluation, direction: int) -> list[Pair]:
    """The prompts whose mean reward rose most (`direction` 1) or fell most (-1); ties are broken by prompt id."""
    both, at_first, at_last = np.intersect1d(first.prompts, last.prompts, return_indices=True)
    change = direction * (last.rewards[at_last] - first.rewards[at_first])
    candidates = np.flatnonzero(change > 0)
    if len(candidates) > PAIRS:
        candidates = candidates[change[candidates] >= np.sort(change[candidates])[-PAIRS]]
    rows = {int(i): (first.typical(both[i]), last.typical(both[i])) for i in candidates}
    records = {i: read_line(*index.place(before)) or {} for i, (before, _) in rows.items()}
    ids = {i: str(record.get("prompt_id", "")) for i, record in records.items()}
    chosen = sorted(rows, key=lambda i: (-change[i], ids[i]))[:PAIRS]
    return [
        Pair(ids[i], (float(first.rewards[at_first[i]]), float(last.rewards[at_last[i]])), *rows[i]) for i in chosen
    ]
