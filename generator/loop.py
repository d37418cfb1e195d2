"""The generator: it runs an episode for each task that it leases, and keeps the weights fresh."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common.config import Config
from common.messages import Failure
from common.payload import Payload
from common.process import in_thread
from common.streams import scoring
from common.streams.inbox import Delivery, Finished, Pulse
from common.streams.presence import LearnerWatch
from generator.chat.prompts import UnusablePrompt
from generator.concurrency import STALL_SECONDS
from generator.episode.self_teacher import CannotTell
from generator.rewards.failures import RewardFailures
from generator.rewards.pool import RewardFailed
from generator.rewards.scorer import OutOfRange
from generator.services import Services
from generator.slots import Cache, Slots
from generator.task_runner import Attempt, TaskRunner
from generator.task_source import TaskSource
from generator.weight_updater import WeightUpdater
from generator.worker import Leased, Worker


@dataclass(eq=False)
class LeasedTask(Leased):
    """A task leased by this generator.

    Attributes:
        previous: the response before this one to the same prompt, where drift is measured on it.
        attempt: the one under way, once its episode is prepared.
        awaits_weights: it has a slot, but asks for newer weights than there are.
    """

    previous: Payload | None = None
    attempt: Attempt | None = None
    awaits_weights: bool = False


class Generator(Worker[LeasedTask]):
    """Runs episodes, as many at once as `Slots` says, until the run is finished or `stop` is set."""

    failure = "episode failed"
    kind = LeasedTask

    def __init__(self, config: Config, services: Services) -> None:
        super().__init__(config, services.inbox, services.presence, services.metrics, services.log)
        self.inbox, self.metrics = services.inbox, services.metrics
        self.engine, self.parts = services.engine, services.parts
        self.runner = TaskRunner(config, self.engine, self.parts, self.inbox.name, self.log, services.endpoint)
        self.weights = WeightUpdater(config, services)
        self.endpoint = services.endpoint
        self.source = TaskSource(self.inbox, self.weights, services.broker.dead_after, self.log)
        self.rescores = config.sampler.drift.mode == "rescore"
        self.learner = LearnerWatch(services.broker, services.log)
        self.teachers = {
            source: scoring.teacher_of(own.teacher, config) for source, (own, _) in self.parts.by_source.items()
        }
        longest = max(episode.max_response_tokens for episode in config.episodes_in_use().values())
        self.slots = Slots(
            config.generator.max_concurrency,
            Cache(self.engine),
            min(config.model.max_model_len, config.data.max_prompt_tokens + longest),
        )

    async def begin(self, group: asyncio.TaskGroup) -> bool:
        """Load the first weights; False: the run ended before there were any."""
        self.rewards = RewardFailures()
        group.create_task(self.rewards.end())
        if self.config.run.has_learner:
            group.create_task(self._watch_learner())
        group.create_task(self.engine.watch(self.config.broker.heartbeat))
        if not await self.weights.load_first():
            return False
        group.create_task(self.weights.follow())
        self.log.info("ready", version=self.engine.version, concurrency=self.slots.limit)
        self.presence.status(state="running", version=self.engine.version)
        return True

    def room(self) -> int:
        """The free slots, and those of tasks that await newer weights.

        Such a task gives its slot to an evaluation, for which the present weights are kept.
        """
        return self.slots.limit - self.slots_taken + self._waiting()

    async def next(self, n: int) -> list[Delivery]:
        """Lease up to `n` tasks; training tasks are left to generators that have the weights which tasks here await."""
        return await self.source.next(n, 0 if self._waiting() else n)

    async def prepare(self, leases: Sequence[LeasedTask]) -> None:
        """Read the previous responses to the prompts."""
        training = [lease for lease in leases if lease.delivery.task.kind == "train"]
        if self.rescores and training:
            prompt_ids = [lease.delivery.task.prompt_id for lease in training]
            for lease, payload in zip(training, await in_thread(self.inbox.previous, prompt_ids), strict=True):
                lease.previous = payload

    async def do(self, lease: LeasedTask) -> Finished:
        """Run the episode of a task, and score it."""
        delivery, task = lease.delivery, lease.delivery.task
        if task.min_version > self.weights.version:
            lease.awaits_weights = True
            self.slot_freed.set()  # for an evaluation
        try:
            async with self.weights.at_least(task.min_version):
                lease.awaits_weights = False
                lease.attempt = attempt = await self.runner.begin(task)
                with self.metrics.timeline.span(task.kind, lane="episodes", task=task.task_id):
                    header, payload = await attempt.run(lease.previous)
        except UnusablePrompt as error:
            return self.inbox.set_aside(delivery, error.failure, f"{type(error).__name__}: {error}", retire=True)
        except CannotTell as error:
            return await self.give_up(lease, error.failure, str(error))
        except (RewardFailed, OutOfRange) as error:
            self.rewards.failed(error, delivery.attempt)
            raise
        self.rewards.scored()
        self.metrics.finished(header.model_tokens)
        if payload is None:
            return Finished(delivery.entry_id, header)
        teacher = self.teachers[attempt.source.key]
        return Finished(delivery.entry_id, header, payload, keep=self.rescores, teacher=teacher)

    async def failed(self, lease: LeasedTask, failure: Failure, reason: str) -> None:
        """As `Worker` has it; no step of the episode is under way any more."""
        if lease.attempt:
            lease.attempt.episode.step = None
        await super().failed(lease, failure, reason)

    async def give_up(self, lease: LeasedTask, failure: Failure, reason: str) -> Finished:
        """Set a task aside, with what there is of its episode."""
        progress = await lease.attempt.progress() if lease.attempt else {}
        return self.inbox.set_aside(lease.delivery, failure, reason, **progress)

    async def beaten(self, pulse: Pulse) -> None:
        """Say that the weights which answer an evaluation are kept."""
        if pulse.evaluation or self.source.evaluation:
            await self.source.lease()

    def was_named(self, reason: str) -> bool:
        """Whether the log has warned of this line of a user's reward."""
        return self.rewards.was_named(reason)

    def overdue(self, lease: LeasedTask) -> str:
        """Whether a step of the episode goes on long after its time limits."""
        step = lease.attempt.episode.step if lease.attempt else None
        if not step or time.monotonic() <= step.ends:
            return ""
        # Counted in heartbeats: a process that was frozen still gets the time to end its steps.
        step.late += self.config.broker.heartbeat
        if step.late <= STALL_SECONDS:
            return ""
        return f"its step `{step.name}` has not ended {step.late:.0f} s after its time limit"

    async def report(self) -> None:
        """Adapt the number of slots, and publish the status for the display, with metrics for the sampler to write."""
        ended = 0
        while True:
            await asyncio.sleep(self.config.broker.heartbeat)
            self.slots.look(self.slots_taken, self.metrics.episodes - ended)
            self.slot_freed.set()  # there may be more
            ended = self.metrics.episodes
            status = self.metrics.status(self.slots_taken, self.slots.limit, self._waiting())
            if self.endpoint is not None:
                status["refused"] = status["metrics"]["generator/refused"] = self.endpoint.refused
            self.presence.status(**status)

    async def close(self) -> None:
        """Close what episodes use."""
        await self.runner.close()
        await self.parts.close()

    def _waiting(self) -> int:
        """Tasks that have a slot and await newer weights."""
        return sum(lease.awaits_weights for lease in self.leased)

    async def _watch_learner(self) -> None:
        """Report when the learner is gone and nothing is left to do without it."""
        while True:
            if all(lease.awaits_weights for lease in self.leased):
                await in_thread(self.learner.look)
            await asyncio.sleep(self.config.broker.heartbeat)
