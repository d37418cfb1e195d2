"""The generator's loop: lease tasks, run an episode for each, send the results, and keep the weights fresh."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.config import Config
from common.payload import Payload
from common.process import in_thread
from common.streams.presence import LearnerWatch
from common.streams.tasks import Delivery, Finished
from generator.concurrency import STALL_SECONDS
from generator.engine.engine import EngineDied
from generator.episode import Episode
from generator.episode_runner import PromptTooLong
from generator.services import Services
from generator.slots import Cache, Slots
from generator.task_runner import TaskRunner
from generator.task_source import TaskSource
from generator.weight_updater import WeightUpdater

MAX_RESULTS_A_CALL = 64


@dataclass(eq=False)
class LeasedTask:
    """A task leased by this generator, until its result is stored or the task is returned.

    Attributes:
        delivery: the task, and which attempt this is.
        job: runs the episode, then puts its result into the queue; after a failure it waits and requeues the task.
        episode: its state so far.
        takes_slot: false while it backs off after a failure.
        awaits_weights: it has a slot, but asks for newer weights than there are.
        taken_over: another generator has it, or its result is no longer wanted; only its job still has to end.
    """

    delivery: Delivery
    job: asyncio.Task[None] | None = None
    episode: Episode | None = None
    takes_slot: bool = True
    awaits_weights: bool = False
    taken_over: bool = False


class _Stopped(Exception):
    """`Generator.stop` was set."""


class Generator:
    """Runs episodes, as many at once as `Slots` says, until the run is finished or `stop` is set."""

    def __init__(self, config: Config, services: Services) -> None:
        self.config = config
        self.broker, self.inbox, self.presence = services.broker, services.inbox, services.presence
        self.engine, self.parts = services.engine, services.parts
        self.metrics, self.log = services.metrics, services.log
        self.runner = TaskRunner(config, self.engine, self.parts, self.inbox.name, self.log, services.endpoint)
        self.weights = WeightUpdater(config, services)
        self.source = TaskSource(self.inbox, self.weights, self.broker.dead_after, self.log)
        self.rescores = config.sampler.drift.mode == "rescore"
        self.learner = LearnerWatch(services.broker, services.log)
        self.stop = asyncio.Event()
        self.leased: set[LeasedTask] = set()
        self.results: asyncio.Queue[tuple[LeasedTask, Finished]] = asyncio.Queue()
        self.slot_freed = asyncio.Event()
        longest = max(episode.max_response_tokens for episode in config.episodes_in_use().values())
        self.slots = Slots(
            config.generator.max_concurrency,
            Cache(self.engine),
            min(config.model.max_model_len, config.data.max_prompt_tokens + longest),
        )

    @property
    def slots_taken(self) -> int:
        """Episodes running now."""
        return sum(lease.takes_slot for lease in self.leased)

    async def run(self) -> None:
        """Work until `stop` is set; unfinished tasks then return to the queue.

        Raises:
            EngineDied: vLLM is gone; a supervisor should restart this process.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._work(group))
                await self.stop.wait()
                raise _Stopped
        except ExceptionGroup as failures:
            if not isinstance(failures.exceptions[0], _Stopped):
                raise failures.exceptions[0] from None
        finally:
            await self._hand_back()

    async def _work(self, group: asyncio.TaskGroup) -> None:
        if self.config.run.has_learner:
            group.create_task(self._watch_learner())
        group.create_task(self.engine.watch(self.config.broker.heartbeat))
        if not await self.weights.load_first():
            self.stop.set()
            return
        self.log.info("ready", version=self.engine.version, concurrency=self.slots.limit)
        self.presence.status(state="running", version=self.engine.version)
        loops = (self._lease_tasks, self._send_results, self._heartbeat, self.weights.follow, self._report)
        for loop in loops:
            group.create_task(loop())

    async def _lease_tasks(self) -> None:
        while True:
            # A task that awaits newer weights gives its slot to an evaluation, for which the present weights are kept.
            # Meanwhile other training tasks are left to generators that have the newer weights.
            waiting = sum(lease.awaits_weights for lease in self.leased)
            free = self.slots.limit - self.slots_taken
            if free + waiting <= 0:
                self.slot_freed.clear()
                await self.slot_freed.wait()
                continue
            with self.metrics.waiting_for_tasks(idle=not self.slots_taken):
                deliveries = await self._take(free + waiting, 0 if waiting else free)
            await self._start(deliveries)

    async def _take(self, n: int, training: int) -> list[Delivery]:
        """Take new tasks; if the generator stops meanwhile, those of a read under way are still handed back."""
        reading = asyncio.ensure_future(self.source.next(n, training))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            self.leased.update(map(LeasedTask, await reading))
            raise

    async def _start(self, deliveries: list[Delivery]) -> None:
        leases = [LeasedTask(delivery) for delivery in deliveries]
        self.leased.update(leases)
        previous: dict[str, Payload | None] = {}
        if self.rescores:
            prompt_ids = [delivery.task.prompt_id for delivery in deliveries if delivery.task.kind == "train"]
            previous = dict(zip(prompt_ids, await in_thread(self.inbox.previous, prompt_ids), strict=True))
        for lease in leases:
            task = lease.delivery.task
            answer = self._answer(lease, previous.get(task.prompt_id) if task.kind == "train" else None)
            self._start_job(lease, answer)

    def _start_job(self, lease: LeasedTask, work: Coroutine[Any, Any, None]) -> None:
        lease.job = asyncio.create_task(work)
        lease.job.add_done_callback(partial(self._job_ended, lease))

    def _job_ended(self, lease: LeasedTask, _: asyncio.Task[None]) -> None:
        if lease.taken_over:
            self.leased.discard(lease)
        self._free_slot(lease)

    def _free_slot(self, lease: LeasedTask) -> None:
        lease.takes_slot = False
        self.slot_freed.set()

    async def _answer(self, lease: LeasedTask, previous: Payload | None) -> None:
        """Produce the result of one task. A failure that is not the model's is retried or skipped, and never scored."""
        delivery, task, config = lease.delivery, lease.delivery.task, self.config.generator
        try:
            if delivery.attempt > config.max_attempts:
                tried = delivery.attempt - 1
                result = self.inbox.set_aside(delivery, f"given up after {tried} attempts: the generators died or hung")
            else:
                if task.min_version > self.weights.version:
                    lease.awaits_weights = True
                    self.slot_freed.set()  # for an evaluation
                async with self.weights.at_least(task.min_version):
                    lease.awaits_weights = False
                    lease.episode = await self.runner.episodes(task).prepare(task)
                    with self.metrics.timeline.span(task.kind, lane="episodes", task=task.task_id):
                        header, payload = await self.runner.run(task, lease.episode, previous)
                self.metrics.finished(header.model_tokens)
                result = Finished(delivery.entry_id, header, payload, keep=self.rescores and payload is not None)
        except PromptTooLong as error:
            result = self.inbox.set_aside(delivery, str(error), retire=True)
        except EngineDied:
            return  # `Engine.watch` ends the process, which hands everything back
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            await self._failed(lease, "it was cancelled from within")
            return
        except BaseException as error:  # a Rust extension's panic is no Exception
            await self._failed(lease, f"{type(error).__name__}: {error}")
            return
        self.results.put_nowait((lease, result))

    async def _failed(self, lease: LeasedTask, reason: str) -> None:
        """Requeue a task after a pause, during which its slot is free, or skip it after its last attempt."""
        config, delivery, attempt = self.config.generator, lease.delivery, lease.delivery.attempt
        if lease.episode:
            lease.episode.step = None
        self.metrics.failed += 1
        self.log.warning("episode failed", task=delivery.task.task_id, attempt=attempt, error=reason)
        if attempt >= config.max_attempts:
            progress = await self.runner.progress(delivery.task, lease.episode) if lease.episode else {}
            self.results.put_nowait((lease, self.inbox.set_aside(delivery, reason, **progress)))
            return
        lease.delivery = dataclasses.replace(delivery, attempt=attempt + 1)
        self._free_slot(lease)
        await asyncio.sleep(config.retry_pause * 2 ** (attempt - 1))
        await in_thread(self.inbox.requeue, [lease.delivery])
        self.leased.discard(lease)

    async def _send_results(self) -> None:
        """Send results as they come; those that gather during one call are sent together in the next."""
        while True:
            batch = [await self.results.get()]
            while len(batch) < MAX_RESULTS_A_CALL and not self.results.empty():
                batch.append(self.results.get_nowait())
            await asyncio.shield(self._store(batch))

    async def _store(self, batch: list[tuple[LeasedTask, Finished]]) -> None:
        accepted = await in_thread(self.inbox.finish, [result for _, result in batch])
        if accepted < len(batch):
            # Another generator finished them, or their evaluation was started again.
            self.log.warning("results of tasks leased here are no longer wanted", tasks=len(batch) - accepted)
        self.leased.difference_update(lease for lease, _ in batch)

    async def _heartbeat(self) -> None:
        """Renew the leases, drop the tasks that others have taken over, and stop when the run is finished."""
        while True:
            leases = {lease.delivery.entry_id: lease for lease in self.leased if not lease.taken_over}
            pulse = await in_thread(self.inbox.beat, list(leases))
            for entry_id in pulse.lost:
                # Finished meanwhile, taken over because this generator was silent for too long, or no longer wanted.
                lease = leases[entry_id]
                if lease.job and not lease.job.done():
                    self.log.warning("task is no longer leased here", task=lease.delivery.task.task_id)
                    lease.taken_over = True
                    lease.job.cancel()
            if pulse.evaluation or self.source.evaluation:
                await self.source.lease()
            if pulse.finished:
                self.log.info("run is finished")
                self.stop.set()
            self._fail_stuck()
            await asyncio.sleep(self.config.broker.heartbeat)

    def _fail_stuck(self) -> None:
        """Fail each task that heartbeats would keep leased for ever: its job ended without a result, or is overdue."""
        for lease in self.leased:
            job, step = lease.job, lease.episode.step if lease.episode else None
            if job is None or lease.taken_over:
                continue
            if job.done():
                error = asyncio.CancelledError() if job.cancelled() else job.exception()
                if error is None:
                    continue
                reason = f"its job ended without a result: {error!r}"
            elif step and time.monotonic() > step.ends:
                # Counted in heartbeats: a process that was frozen still gets the time to end its steps.
                step.late += self.config.broker.heartbeat
                if step.late <= STALL_SECONDS:
                    continue
                reason = f"its step `{step.name}` has not ended {step.late:.0f} s after its time limit"
                job.cancel()
            else:
                continue
            self._start_job(lease, self._failed(lease, reason))

    async def _watch_learner(self) -> None:
        """Report when the learner is gone and nothing is left to do without it."""
        while True:
            if all(lease.awaits_weights for lease in self.leased):
                await in_thread(self.learner.look)
            await asyncio.sleep(self.config.broker.heartbeat)

    async def _report(self) -> None:
        """Adapt the number of slots, and publish the status for the display, with metrics for the sampler to write."""
        ended = 0
        while True:
            await asyncio.sleep(self.config.broker.heartbeat)
            self.slots.look(self.slots_taken, self.metrics.episodes - ended)
            self.slot_freed.set()  # there may be more
            ended = self.metrics.episodes
            awaiting = sum(lease.awaits_weights for lease in self.leased)
            self.presence.status(**self.metrics.status(self.slots_taken, self.slots.limit, awaiting))

    async def _hand_back(self) -> None:
        """Send what is finished, requeue the rest, and close what episodes use."""
        jobs = [lease.job for lease in self.leased if lease.job]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        while not self.results.empty():
            await self._store([self.results.get_nowait()])
        unfinished = [lease.delivery for lease in self.leased if not lease.taken_over]
        if unfinished:
            returned = await in_thread(self.inbox.requeue, unfinished)
            self.log.info("handed back unfinished tasks", tasks=returned)
            self.leased.clear()
        await self.runner.close()
        await self.parts.close()
        await in_thread(self.inbox.leave)


def _is_cancelled() -> bool:
    """Tell whether the current task is asked to end; a `CancelledError` may also come from code that cancels itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
