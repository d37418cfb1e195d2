"""Admission: how many tasks may be outstanding, so that no sample is too old when it is trained on.

Batch b is trained on by version b, so a task dispatched at version v must be in batch v + max_staleness at the latest.
At most (max_staleness + 1) * batch_size samples are dispatched and not yet trained on, so there is a place for
each in time. Others may overtake a slow answer as long as places remain for it; then the batch waits (`awaited`).
So staleness is bounded without throwing slow, long answers away.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from sampler.state import InFlight


class Admission:
    """The tasks in flight and the room for more."""

    def __init__(self, batch_size: int, max_staleness: int, steps: int) -> None:
        self.in_flight: dict[str, InFlight] = {}
        self.training = 0  # tasks in flight that are not evaluation
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._needed = steps * batch_size
        self._versions: Counter[int] = Counter()
        self._prompts: Counter[str] = Counter()

    def dispatched(self, task_id: str, memo: InFlight) -> None:
        """Remember a task until its header arrives."""
        self.in_flight[task_id] = memo
        if not memo.evaluation:
            self.training += 1
            self._versions[memo.version] += 1
            self._prompts[memo.prompt_id] += 1

    def arrived(self, task_id: str) -> InFlight | None:
        """Forget a task; None if it was not in flight."""
        memo = self.in_flight.pop(task_id, None)
        if memo is not None and not memo.evaluation:
            self.training -= 1
            _take(self._versions, memo.version)
            _take(self._prompts, memo.prompt_id)
        return memo

    def promised(self, batches: int, waiting: int) -> int:
        """Samples that have been trained on or will be: in closed batches, waiting in the open one, in flight."""
        return batches * self._batch_size + waiting + self.training

    def room(self, version: int, batches: int, waiting: int) -> int:
        """Tasks that may be dispatched now, given the newest version and what `promised` counts."""
        allowed = min((version + self._max_staleness + 1) * self._batch_size, self._needed)
        return max(0, allowed - self.promised(batches, waiting))

    def min_version(self, position: int) -> int:
        """Oldest weights that may answer the task with this position among the promised, or it would be late."""
        return max(0, position // self._batch_size - self._max_staleness)

    def awaited(self, batch_id: int, arrived: Counter[int]) -> bool:
        """Whether some task in flight could find no place in time if this batch closed now.

        Args:
            arrived: samples that wait for a batch, by the version of their oldest token.
        """
        for later in range(self._max_staleness + 1):
            # Whatever is this old must be in one of the next 1 + later batches.
            oldest = batch_id + later - self._max_staleness
            flying = sum(n for version, n in self._versions.items() if version <= oldest)
            if flying > later * self._batch_size:
                here = sum(n for version, n in arrived.items() if version <= oldest)
                if here < self._batch_size:
                    return True
        return False

    def busy(self, index: dict[str, int]) -> np.ndarray:
        """Indices of the prompts in flight, int64 [K]."""
        return np.fromiter((index[prompt_id] for prompt_id in self._prompts if prompt_id in index), np.int64)


def _take(counts: Counter, key: object) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
