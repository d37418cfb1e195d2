"""The generator: it leases tasks, runs an episode for each, sends the results, and keeps the weights fresh."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.config import Config
from common.errors import UserError
from common.held_folder import HeldFolder
from common.messages import Failure, failure_of
from common.payload import Payload
from common.process import in_thread
from common.streams.broker import Broker
from common.streams.presence import LearnerWatch
from common.streams.tasks import Delivery, Finished
from generator.chat.prompts import UnusablePrompt
from generator.concurrency import STALL_SECONDS, tune_interpreter, watch
from generator.engine.engine import EngineDied
from generator.rewards.failures import RewardFailures
from generator.rewards.pool import RewardFailed
from generator.rewards.scorer import OutOfRange
from generator.services import Services
from generator.slots import Cache, Slots
from generator.task_runner import SCORING, Attempt, TaskRunner
from generator.task_source import TaskSource
from generator.teacher.self_teacher import NoTeacherPrompt
from generator.weight_updater import WeightUpdater

MAX_RESULTS_A_CALL = 64


@dataclass(eq=False)
class LeasedTask:
    """A task leased by this generator, until its result is stored or the task is returned.

    Attributes:
        delivery: the task, and the number of its attempt.
        job: runs the task's episode and queues its result; after a failure it waits and requeues the task.
        takes_slot: false while it backs off after a failure.
        taken_over: another generator has the task, or its result is no longer wanted; only the job must still end.
        previous: the previous response to the same prompt, if drift is measured on it (mode `rescore`).
        attempt: the current attempt; None until its episode is prepared.
        awaits_weights: it has a slot, and waits for newer weights.
    """

    delivery: Delivery
    job: asyncio.Task[None] | None = None
    takes_slot: bool = True
    taken_over: bool = False
    previous: Payload | None = None
    attempt: Attempt | None = None
    awaits_weights: bool = False

    @property
    def awaits_scores(self) -> bool:
        """Whether its episode has ended and waits for its teacher's scores."""
        step = self.attempt.episode.step if self.attempt else None
        return step is not None and step.name == SCORING


class _Stopped(Exception):
    """`Generator.stop` was set."""


class Generator:
    """Runs episodes, as many at once as `Slots` says, until the run is finished or `stop` is set."""

    def __init__(self, config: Config, services: Services) -> None:
        self.config, self.log = config, services.log
        self.inbox, self.presence, self.metrics = services.inbox, services.presence, services.metrics
        self.engine, self.parts, self.endpoint = services.engine, services.parts, services.endpoint
        self.runner = TaskRunner(
            config, self.engine, self.parts, self.inbox.name, self.log, self.endpoint, services.teachers
        )
        self.weights = WeightUpdater(config, services)
        self.source = TaskSource(self.inbox, self.weights, services.broker.dead_after, self.log)
        self.rescores = config.sampler.drift.mode == "rescore"
        self.learner = LearnerWatch(services.broker, services.log)
        longest = max(episode.max_response_tokens for episode in config.episodes_in_use().values())
        self.slots = Slots(
            config.generator.max_concurrency,
            Cache(self.engine),
            min(config.model.max_model_len, config.data.max_prompt_tokens + longest),
        )
        self._folder = HeldFolder(config.run.folder)
        self.stop = asyncio.Event()
        self.leased: set[LeasedTask] = set()
        self.results: asyncio.Queue[tuple[LeasedTask, Finished]] = asyncio.Queue()
        self.slot_freed = asyncio.Event()

    async def run(self) -> None:
        """Work until `stop` is set; unfinished tasks then return to the queue.

        Raises:
            EngineDied: vLLM is gone; a supervisor should restart this process.
            FolderGone: the run folder is no longer where it was.
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
        """Load the first weights, then start all loops."""
        self.rewards = RewardFailures()
        group.create_task(self.rewards.end())
        if self.config.run.has_learner:
            group.create_task(self._watch_learner())
        group.create_task(self.engine.watch(self.config.broker.heartbeat))
        if not await self.weights.load_first():  # the run ended before there were any
            self.stop.set()
            return
        self.log.info("ready", version=self.engine.version, concurrency=self.slots.limit)
        self.presence.status(state="running", version=self.engine.version)
        for loop in (self.weights.follow, self._lease_tasks, self._send_results, self._heartbeat, self._report):
            group.create_task(loop())

    @property
    def slots_taken(self) -> int:
        """Tasks that are being answered now, except those that only await their teacher's scores."""
        return sum(lease.takes_slot and not lease.awaits_scores for lease in self.leased)

    def room(self) -> int:
        """How many tasks may be leased now: the free slots, and those of tasks that await newer weights.

        A task that awaits weights lends its slot to an evaluation, which needs the current ones.
        """
        return self.slots.limit - self.slots_taken + self._waiting()

    async def _lease_tasks(self) -> None:
        while True:
            room = self.room()
            if room <= 0:
                self.slot_freed.clear()
                await self.slot_freed.wait()
                continue
            with self.metrics.waiting_for_tasks(idle=not self.slots_taken):
                deliveries = await self._take(room)
            leases = [LeasedTask(delivery) for delivery in deliveries]
            self.leased.update(leases)
            await self._read_previous(leases)
            for lease in leases:
                self._start_job(lease, self._do(lease))

    async def _take(self, n: int) -> list[Delivery]:
        """Take new tasks. If the process stops during the read, the tasks that it returns are handed back, too.

        While a task here awaits weights, training tasks are left to generators that may already have those weights.
        """
        reading = asyncio.ensure_future(self.source.next(n, 0 if self._waiting() else n))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            self.leased.update(map(LeasedTask, await reading))
            raise

    async def _read_previous(self, leases: Sequence[LeasedTask]) -> None:
        """Read the previous responses to the prompts, for all new tasks at once."""
        training = [lease for lease in leases if lease.delivery.task.kind == "train"]
        if self.rescores and training:
            prompt_ids = [lease.delivery.task.prompt_id for lease in training]
            for lease, payload in zip(training, await in_thread(self.inbox.previous, prompt_ids), strict=True):
                lease.previous = payload

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

    async def _do(self, lease: LeasedTask) -> None:
        """Produce the result of one task. A failure that is not the model's is retried or skipped, never counted."""
        tried = lease.delivery.attempt - 1
        try:
            if tried >= self.config.generator.max_attempts:
                reason = f"given up after {tried} attempts: the generators died or hung"
                result = await self._give_up(lease, Failure.GENERATORS_LOST, reason)
            else:
                result = await self._answer(lease)
        except EngineDied:
            return  # `Engine.watch` ends the process, which hands everything back
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            await self._failed(lease, Failure.CANCELLED, "it was cancelled from within")
            return
        except BaseException as error:  # a Rust extension's panic is not an `Exception`
            await self._failed(lease, failure_of(error), f"{type(error).__name__}: {error}")
            return
        self.results.put_nowait((lease, result))

    async def _answer(self, lease: LeasedTask) -> Finished:
        """Run the episode of a task, and score it; an exception is a failed attempt."""
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
        except NoTeacherPrompt as error:
            return await self._give_up(lease, error.failure, str(error))
        except (RewardFailed, OutOfRange) as error:
            self.rewards.failed(error, delivery.attempt)
            raise
        self.rewards.scored()
        self.metrics.finished(header.model_tokens)
        return Finished(delivery.entry_id, header, payload, for_drift=self.rescores and payload is not None)

    async def _failed(self, lease: LeasedTask, failure: Failure, reason: str) -> None:
        """Requeue a task after a pause, during which its slot is free, or skip it after its last attempt."""
        if lease.attempt:
            lease.attempt.episode.step = None  # the episode has ended
        config, delivery, attempt = self.config.generator, lease.delivery, lease.delivery.attempt
        self.metrics.failed += 1
        warn = self.log.info if self.rewards.was_named(reason) else self.log.warning
        warn("episode failed", task=delivery.task.task_id, attempt=attempt, error=reason)
        if attempt >= config.max_attempts:
            self.results.put_nowait((lease, await self._give_up(lease, failure, reason)))
            return
        lease.delivery = dataclasses.replace(delivery, attempt=attempt + 1)
        self._free_slot(lease)
        await asyncio.sleep(config.retry_pause * 2 ** (attempt - 1))
        await in_thread(self.inbox.requeue, [lease.delivery])
        self.leased.discard(lease)

    async def _give_up(self, lease: LeasedTask, failure: Failure, reason: str) -> Finished:
        """Skip a task, and keep the record of its episode, if there is one, for inspection."""
        progress = await lease.attempt.progress() if lease.attempt else {}
        return self.inbox.set_aside(lease.delivery, failure, reason, **progress)

    async def _send_results(self) -> None:
        """Send results as they arrive; those that arrive during one call are sent together in the next."""
        while True:
            batch = [await self.results.get()]
            while len(batch) < MAX_RESULTS_A_CALL and not self.results.empty():
                batch.append(self.results.get_nowait())
            await asyncio.shield(self._store(batch))

    async def _store(self, batch: list[tuple[LeasedTask, Finished]]) -> None:
        accepted = await in_thread(self.inbox.finish, [result for _, result in batch])
        if accepted < len(batch):
            # Another generator has finished them, or their evaluation was started again.
            self.log.warning("results of tasks leased here are no longer wanted", tasks=len(batch) - accepted)
        self.leased.difference_update(lease for lease, _ in batch)

    async def _heartbeat(self) -> None:
        """Renew the leases, drop the tasks that others have taken over, and stop when the run is finished."""
        while True:
            self._folder.check()
            leases = {lease.delivery.entry_id: lease for lease in self.leased if not lease.taken_over}
            pulse = await in_thread(self.inbox.beat, list(leases))
            for entry_id in pulse.lost:
                # The task is finished, taken over because this process was silent for too long, or no longer wanted.
                lease = leases[entry_id]
                if lease.job and not lease.job.done():
                    self.log.warning("task is no longer leased here", task=lease.delivery.task.task_id)
                    lease.taken_over = True
                    lease.job.cancel()
            if pulse.evaluation or self.source.evaluation:
                await self.source.lease()  # announces that this generator keeps the weights that answer it
            if pulse.finished:
                self.log.info("run is finished")
                self.stop.set()
            self._fail_stuck()
            await asyncio.sleep(self.config.broker.heartbeat)

    def _fail_stuck(self) -> None:
        """Fail each task that heartbeats would keep leased for ever: its job ended without a result, or is overdue."""
        for lease in self.leased:
            job = lease.job
            if job is None or lease.taken_over:
                continue
            if job.done():
                error = asyncio.CancelledError() if job.cancelled() else job.exception()
                if error is None:
                    continue
                failure = Failure.CANCELLED if job.cancelled() else failure_of(error)
                reason = f"its job ended without a result: {error!r}"
            elif reason := self._overdue(lease):
                failure = Failure.TIMED_OUT
                job.cancel()
            else:
                continue
            self._start_job(lease, self._failed(lease, failure, reason))

    def _overdue(self, lease: LeasedTask) -> str:
        """Why a task has failed, if its step has long exceeded its time limits; else empty."""
        step = lease.attempt.episode.step if lease.attempt else None
        if not step or time.monotonic() <= step.ends:
            return ""
        # Counted in heartbeats, so that a process that was frozen has time to end its steps.
        step.late += self.config.broker.heartbeat
        if step.late <= STALL_SECONDS:
            return ""
        return f"its step `{step.name}` has not ended {step.late:.0f} s after its time limit"

    async def _report(self) -> None:
        """Adapt the number of slots, and publish the status for the display, with metrics for the sampler to write."""
        ended = 0
        while True:
            await asyncio.sleep(self.config.broker.heartbeat)
            self.slots.look(self.slots_taken, self.metrics.episodes - ended)
            self.slot_freed.set()  # there may be more
            ended = self.metrics.episodes
            scoring = sum(lease.awaits_scores for lease in self.leased)
            status = self.metrics.status(self.slots_taken, self.slots.limit, self._waiting(), scoring)
            if self.endpoint is not None:
                status["refused"] = status["metrics"]["generator/refused"] = self.endpoint.refused
            self.presence.status(**status)

    async def _hand_back(self) -> None:
        """Send what is finished, requeue the rest, and close what the tasks have used."""
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

    def _waiting(self) -> int:
        """Tasks that have a slot and await newer weights."""
        return sum(lease.awaits_weights for lease in self.leased)

    async def _watch_learner(self) -> None:
        """Report when the learner is gone and nothing is left to do without it."""
        while True:
            if all(lease.awaits_weights for lease in self.leased):
                await in_thread(self.learner.look)
            await asyncio.sleep(self.config.broker.heartbeat)


async def serve(generator: Generator, broker: Broker) -> None:
    """Run a generator until it ends or the process is asked to stop (SIGTERM, Ctrl-C); raises like `Generator.run`.

    The process exits with an error if its event loop is blocked for too long.
    """

    def stop() -> None:
        generator.stop.set()
        broker.patience.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    tune_interpreter()
    watching = asyncio.create_task(watch())
    try:
        await generator.run()
    except UserError:
        raise  # `entry_point` prints it
    except Exception as error:
        generator.log.error("failed", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        watching.cancel()


def _is_cancelled() -> bool:
    """Whether the current task was cancelled; a `CancelledError` may also come from code that cancels itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
