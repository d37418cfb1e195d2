"""A teacher's process around a pretend scorer, and the sampler's view of its results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import structlog

from common.config import parse_config
from common.messages import SampleHeader
from common.process import in_thread
from common.streams import scoring
from common.streams.broker import Broker
from common.streams.ledger import SamplerLedger
from common.streams.presence import Presence
from common.streams.scoring import ScoringInbox
from generator.engine.engine import EngineDied
from generator.metrics import WorkMetrics
from generator.teacher.loop import Teacher
from generator.teacher.scores import Scores
from tests.support.streams import Crew

DEADLINE = 600.0


def constant(token_ids: np.ndarray, top_k: int) -> Scores:
    """-0.5 for each token; the likeliest are 0, 1, ..."""
    shape = (len(token_ids), max(1, top_k))
    ids = np.tile(np.arange(top_k, dtype=np.int32), (len(token_ids), 1))
    return Scores(np.full(shape, -0.5, np.float32), ids)


class PretendScorer:
    """Scores as `answer` says, which may raise; `hold` makes it wait."""

    def __init__(self) -> None:
        self.answer: Callable[[np.ndarray, int], Scores] = constant
        self.calls: list[int] = []
        self.hold = asyncio.Event()
        self.died = False

    async def score(self, token_ids: np.ndarray, top_k: int) -> Scores:
        self.calls.append(len(token_ids))
        await self.hold.wait()
        return self.answer(token_ids, top_k)

    async def watch(self, beat: float) -> None:
        while not self.died:
            await asyncio.sleep(beat)
        raise EngineDied("gone")

    async def close(self) -> None: ...


class TeacherRig:
    """A teacher's process, and what comes before and after it."""

    def __init__(self, broker: Broker, **teacher: Any) -> None:
        self.broker = broker
        self.config = parse_config(
            {
                "model": {"path": "m", "max_model_len": 512},
                "data": {"train": "t", "max_prompt_tokens": 64},
                "generator": {"max_attempts": 2, "retry_pause": 0},
                "broker": {"dead_after": 0.1},
                "teacher": {"model": "large", "max_concurrency": 4} | teacher,
            }
        )
        ((name, self.teacher),) = scoring.teachers(self.config).items()
        self.ledger = SamplerLedger(broker, "sampler")
        self.ledger.acquire()
        self.crew, self.inbox, self.scorer = Crew(self.ledger, name), ScoringInbox(broker, "one", name), PretendScorer()
        self.metrics = WorkMetrics("teacher", "samples")
        self.presence = Presence(broker, "one", "teacher", interval=60.0)
        self.process = Teacher(
            self.config, self.teacher, self.inbox, self.scorer, self.presence, self.metrics, structlog.get_logger()
        )

    async def headers(self, n: int) -> list[SampleHeader]:
        """Wait until `n` headers have arrived; they stay unread for the sampler."""
        async with asyncio.timeout(DEADLINE):
            while await in_thread(self.ledger.arrived) < n:
                await asyncio.sleep(0.01)
        return [header for _, header in await in_thread(self.ledger.read, 256, 20)]

    def play(self, story: Callable[[TeacherRig], Awaitable[Any]]) -> Any:
        """Run the process while a story unfolds, then stop it."""

        async def scene() -> Any:
            self.scorer.hold = asyncio.Event()
            self.scorer.hold.set()
            running = asyncio.create_task(self.process.run())
            try:
                return await story(self)
            finally:
                self.process.stop.set()
                await asyncio.wait_for(running, DEADLINE)

        return asyncio.run(scene())

    def one(self) -> SampleHeader:
        """The header of one episode, dispatched now."""
        self.crew.dispatch(1)
        (header,) = self.play(lambda rig: rig.headers(1))
        return header
