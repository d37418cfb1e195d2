"""The teacher's loop: score each finished episode that it leases, and send it on to the sampler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.config import Config, TeacherConfig
from common.messages import Failure, SampleHeader
from common.payload import Payload
from common.process import in_thread
from common.streams.inbox import Delivery, Finished
from common.streams.presence import Presence
from common.streams.scoring import ScoringInbox
from generator.metrics import WorkMetrics
from generator.teacher.scores import Scorer, with_scores
from generator.worker import Leased, Worker

BLOCK_MS = 100


class TokensLost(Exception):
    """The tokens of an episode are missing or invalid."""

    failure = Failure.TEACHER_FAILED


@dataclass(eq=False)
class LeasedEpisode(Leased):
    """An episode leased by this process; `payload` is None where its tokens are missing or invalid."""

    payload: Payload | None = None


class Teacher(Worker[LeasedEpisode]):
    """Scores episodes, `teacher.max_concurrency` at once, until the run is finished or `stop` is set."""

    failure = "scoring failed"
    kind = LeasedEpisode

    def __init__(
        self,
        config: Config,
        teacher: TeacherConfig,
        inbox: ScoringInbox,
        scorer: Scorer,
        presence: Presence,
        metrics: WorkMetrics,
        log: Any,
    ) -> None:
        super().__init__(config, inbox, presence, metrics, log)
        self.teacher, self.inbox, self.scorer, self.metrics = teacher, inbox, scorer, metrics
        self._adopt_every, self._adopt_at = config.broker.dead_after / 2, 0.0

    async def begin(self, group: asyncio.TaskGroup) -> bool:
        """Watch the scorer; a teacher needs nothing of the run before its first episode."""
        group.create_task(self.scorer.watch(self.config.broker.heartbeat))
        self.log.info("ready", concurrency=self.teacher.max_concurrency)
        self.presence.status(state="running")
        return True

    def room(self) -> int:
        """The free slots."""
        return self.teacher.max_concurrency - self.slots_taken

    async def next(self, n: int) -> list[Delivery[SampleHeader]]:
        """Lease up to `n` episodes, those of dead processes first."""
        if time.monotonic() >= self._adopt_at:
            self._adopt_at = time.monotonic() + self._adopt_every
            if adopted := await in_thread(self.inbox.adopt, n):
                self.log.warning("took over episodes of a dead teacher", episodes=len(adopted))
                return adopted
        return await in_thread(self.inbox.take, n, BLOCK_MS)

    async def prepare(self, leases: Sequence[LeasedEpisode]) -> None:
        """Read the episodes' tokens."""
        payloads = await in_thread(self.inbox.payloads, [lease.delivery for lease in leases])
        for lease, payload in zip(leases, payloads, strict=True):
            lease.payload = payload

    async def do(self, lease: LeasedEpisode) -> Finished:
        """Score an episode."""
        delivery, payload = lease.delivery, lease.payload
        if payload is None:
            raise TokensLost("its tokens are missing or invalid")
        with self.metrics.timeline.span("score", lane="episodes", task=delivery.task.task_id):
            scored = await with_scores(payload, self.scorer, self.teacher.top_k)
        self.metrics.finished(delivery.task.model_tokens)
        return Finished(delivery.entry_id, delivery.task, scored)

    async def give_up(self, lease: LeasedEpisode, failure: Failure, reason: str) -> Finished:
        """Set an episode aside: without scores it is not trained on."""
        return self.inbox.set_aside(lease.delivery, failure, reason)

    async def report(self) -> None:
        """Publish the status for the display, with metrics for the sampler to write."""
        while True:
            await asyncio.sleep(self.config.broker.heartbeat)
            self.presence.status(**self.metrics.work_status(self.slots_taken, self.teacher.max_concurrency))

    async def close(self) -> None:
        """Nothing is left open by an episode; the scorer ends with the process."""
