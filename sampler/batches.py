"""The open batch: counted samples wait here until the learner's next batch is full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from common.config import AlgorithmConfig, SamplerConfig
from common.messages import Batch
from sampler.advantages import load_advantage
from sampler.records import OpenSample


@dataclass(frozen=True, slots=True)
class ClosedBatch:
    """A manifest for the learner, and its samples in the manifest's order."""

    manifest: Batch
    samples: list[OpenSample]


class OpenBatch:
    """Complete groups that wait for a batch, oldest weights first; an ungrouped sample is a group of one."""

    def __init__(self, config: SamplerConfig, algorithm: AlgorithmConfig | None = None, next_id: int = 0) -> None:
        self.groups: dict[str, list[OpenSample]] = {}  # by id
        self.versions: Counter[int] = Counter()  # samples by the version of the oldest token of their group
        self.next_id = next_id
        self._config = config
        self._algorithm = algorithm or AlgorithmConfig()
        self._responses = self._algorithm.responses
        self._advantage = load_advantage(self._algorithm, config.advantage)

    def __len__(self) -> int:
        return len(self.groups) * self._responses

    def samples(self) -> Iterator[OpenSample]:
        for group in self.groups.values():
            yield from group

    def add(self, *group: OpenSample) -> None:
        """Add a complete group."""
        self.groups[group[0].group_id] = list(group)
        self.versions[_oldest_version(group)] += len(group)

    def drop_late(self) -> list[OpenSample]:
        """Remove and return the samples that are too old for the next batch, and so for all that follow."""
        oldest = self.next_id - self._config.max_staleness
        if not self.versions or min(self.versions) >= oldest:
            return []
        late = [group for group in self.groups.values() if _oldest_version(group) < oldest]
        return self._remove(late)

    def full(self) -> bool:
        return len(self) >= self._config.batch_size

    def take_next(self) -> ClosedBatch:
        """Take out the next batch: oldest weights first, then in order of arrival."""
        by_age = sorted(self.groups.values(), key=lambda group: (_oldest_version(group), group[-1].arrival))
        chosen = by_age[: self._config.batch_size // self._responses]
        chosen.sort(key=lambda group: group[0].arrival)
        samples = self._remove(chosen)
        advantages = self._advantages(samples)
        # Advantages were computed group after group; the manifest lists the samples in the order of arrival.
        order = sorted(range(len(samples)), key=lambda i: samples[i].arrival)
        samples = [samples[i] for i in order]
        values, returns = self._outcomes(samples) if self._algorithm.has_critic else (None, None)
        manifest = Batch(
            batch_id=self.next_id,
            sample_ids=[s.sample_id for s in samples],
            advantages=advantages[order].tolist(),
            rewards=[s.reward for s in samples],
            tokens=[s.tokens for s in samples],
            turn_advantages=self._turn_advantages(samples),
            row_tokens=[s.row_tokens for s in samples] if any(s.row_tokens for s in samples) else None,
            kept=[s.kept for s in samples] if any(s.kept for s in samples) else None,
            values=values,
            returns=returns,
        )
        self.next_id += 1
        return ClosedBatch(manifest, samples)

    def _outcomes(self, samples: list[OpenSample]) -> tuple[list[float], list[list[float]]]:
        """A critic's training data: the tracker's values, and the returns rescaled to the same range."""
        low, high = self._config.tracker.reward_range
        returns = [[(value - low) / (high - low) for value in s.turn_returns or [s.reward]] for s in samples]
        return [s.baseline for s in samples], returns

    def _turn_advantages(self, samples: list[OpenSample]) -> list[list[float]] | None:
        """Advantages of each sample's turns, each of which counts like a sample; None unless turns have returns."""
        if not any(s.turn_returns for s in samples):
            return None
        turns = [len(s.turn_returns) for s in samples]
        columns = [np.concatenate([getattr(s, name) for s in samples]) for name in ("turn_returns", "turn_tokens")]
        owners = np.repeat(np.arange(len(samples)), turns)
        baselines = self._baselines(samples)[owners]
        advantages = self._advantage(columns[0], baselines, owners, columns[1])
        return [one.tolist() for one in np.split(advantages, np.cumsum(turns)[:-1])]

    def _advantages(self, samples: list[OpenSample]) -> np.ndarray:
        """Advantages of the samples of whole groups, group after group, float64 [B]."""
        rewards, tokens = np.array([s.reward for s in samples]), np.array([s.model_tokens for s in samples])
        groups = np.arange(len(samples)) // self._responses
        return self._advantage(rewards, self._baselines(samples), groups, tokens)

    def _baselines(self, samples: list[OpenSample]) -> np.ndarray:
        """Baselines in the range of the rewards, float64 [B]."""
        low, high = self._config.tracker.reward_range
        return low + (high - low) * np.array([s.baseline for s in samples])

    def _remove(self, groups: list[list[OpenSample]]) -> list[OpenSample]:
        """Take groups out; returns their samples."""
        for group in groups:
            del self.groups[group[0].group_id]
            self.versions[_oldest_version(group)] -= len(group)
        self.versions = +self.versions  # drops counts of 0, which `drop_late` would take for waiting samples
        return [sample for group in groups for sample in group]


def _oldest_version(group: list[OpenSample] | tuple[OpenSample, ...]) -> int:
    return min(sample.oldest_version for sample in group)
