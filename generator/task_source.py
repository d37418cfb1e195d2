"""Leases a generator's tasks, and keeps its weights while it answers an evaluation."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from common.process import in_thread
from common.streams.tasks import Delivery, Lease, TaskInbox
from generator.weight_updater import WeightUpdater

BLOCK_MS = 100


class TaskSource:
    """Leases tasks, those of the open evaluation first.

    An evaluation is answered with one version of the weights. A generator that has that version keeps it from the
    moment it asks for tasks until it learns that the evaluation is over; it continues to answer training tasks.
    Other generators with that version keep it too, so that they can take over the tasks of one that dies.
    """

    def __init__(self, inbox: TaskInbox, weights: WeightUpdater, dead_after: float, log: Any) -> None:
        self.inbox, self.weights, self.log = inbox, weights, log
        self.evaluation = ""  # name of the evaluation for which the weights are kept
        self._asking = asyncio.Lock()
        self._adopt_every, self._adopt_at = dead_after / 2, 0.0

    async def next(self, n: int, training: int) -> list[Delivery]:
        """Return up to `n` tasks, at most `training` of them outside evaluations; waits a little if there is none."""
        if time.monotonic() >= self._adopt_at:
            deliveries = await self._adopt(n, training)
            self._adopt_at = time.monotonic() + self._adopt_every
            if deliveries:
                self.log.warning("took over tasks of a dead generator", tasks=len(deliveries))
                return deliveries
        deliveries = await self.lease(n, training)
        if deliveries:
            return deliveries
        if training < 1:
            await asyncio.sleep(BLOCK_MS / 1000)
            return []
        # Take only one: an evaluation may start while this waits, and its tasks have priority.
        return await in_thread(self.inbox.take, 1, BLOCK_MS)

    async def lease(self, n: int = 0, training: int = 0) -> list[Delivery]:
        """Lease available tasks; even with `n` = 0, the call announces that this generator keeps its version."""
        async with self._asking:
            version = self.weights.version if self.weights.hold() else -1
            lease = Lease("", [])
            try:
                lease = await in_thread(self.inbox.lease, version, n, training)
            finally:
                if lease.evaluation not in ("", self.evaluation):
                    self.log.info("answering an evaluation", evaluation=lease.evaluation, version=version)
                self.evaluation = lease.evaluation
                if not lease.evaluation:
                    self.weights.release()
            return lease.deliveries

    async def _adopt(self, n: int, training: int) -> list[Delivery]:
        async with self._asking:
            deliveries = await in_thread(self.inbox.adopt, n, self.evaluation) if self.evaluation else []
        training = min(training, n - len(deliveries))
        return deliveries + await in_thread(self.inbox.adopt, training) if training > 0 else deliveries
