"""Samples that were not trained on because their tokens were gone or unusable; too many of them end the run."""

from __future__ import annotations

from collections import deque

from common.config import Config
from common.errors import UserError
from common.streams.broker import NOEVICTION, Broker

WINDOW = 8  # batches


class LeftOut:
    """Counts the samples of the newest batches that were left out; the same on all ranks.

    The share is always of `WINDOW` batches, or of all steps of a shorter run: batches still to come count as complete.
    """

    def __init__(self, config: Config, broker: Broker) -> None:
        self._limit, self._broker = config.learner.max_left_out, broker
        self._counts: deque[int] = deque(maxlen=max(1, min(WINDOW, config.run.steps)))

    def add(self, samples: int, left_out: int, reason: str, saved: int) -> None:
        """Count a batch that was trained on.

        Args:
            reason: why a sample's tokens were unusable; empty if they were gone.
            saved: version of the newest checkpoint.

        Raises:
            UserError: more than the share `learner.max_left_out` of the newest batches was left out.
        """
        self._counts.append(left_out)
        number = self._counts.maxlen or 1
        if sum(self._counts) <= self._limit * number * samples:
            return
        raise UserError(
            f"{sum(self._counts)} samples of the last {len(self._counts)} batches, of {samples} each, could not be "
            f"trained on, more than learner.max_left_out = {self._limit:g} of {number} batches: {self._cause(reason)}; "
            f"then start the run again, from step {saved}, with -o learner.max_left_out=1 to train on what is left"
        )

    def _cause(self, reason: str) -> str:
        policy, evicted = self._broker.memory().policy, self._broker.evicted()
        if evicted or policy != NOEVICTION:
            return (
                f"Redis has dropped {evicted:,} keys to save memory (maxmemory-policy {policy}); run `CONFIG SET "
                f"maxmemory-policy {NOEVICTION}` there, and raise its maxmemory"
            )
        if reason:
            return f"the last one because of its tokens ({reason}); find out what wrote them"
        return (
            "their tokens are gone from Redis, which has evicted no key itself (maxmemory-policy noeviction): find out "
            "what deletes keys there"
        )
