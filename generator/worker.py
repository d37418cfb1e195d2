"""The loop of a process that works on leased tasks: lease them, work on many at once, send results, renew, hand back.

Generators (`generator/loop.py`) and teachers (`generator/teacher/loop.py`) add what a task is and how it is done.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from common.config import Config
from common.errors import UserError
from common.held_folder import HeldFolder
from common.messages import Failure, failure_of
from common.process import in_thread
from common.streams.broker import Broker
from common.streams.inbox import Delivery, Finished, Inbox, Pulse
from common.streams.presence import Presence
from generator.concurrency import tune_interpreter, watch
from generator.engine.engine import EngineDied
from generator.metrics import WorkMetrics

MAX_RESULTS_A_CALL = 64


@dataclass(eq=False)
class Leased:
    """A task leased by this process, until its result is stored or the task is returned.

    Attributes:
        delivery: the task, and which attempt this is.
        job: does the task, then puts its result into the queue; after a failure it waits and requeues the task.
        takes_slot: false while it backs off after a failure.
        taken_over: another process has it, or its result is no longer wanted; only its job still has to end.
    """

    delivery: Delivery[Any]
    job: asyncio.Task[None] | None = None
    takes_slot: bool = True
    taken_over: bool = False


L = TypeVar("L", bound=Leased)


class _Stopped(Exception):
    """`Worker.stop` was set."""


class Worker(ABC, Generic[L]):
    """Does leased tasks, many at once, until the run is finished or `stop` is set."""

    failure: ClassVar[str]  # what the log says of an attempt that failed
    kind: type[L]  # of its leases

    def __init__(self, config: Config, inbox: Inbox[Any], presence: Presence, metrics: WorkMetrics, log: Any) -> None:
        self.config, self.presence, self.log = config, presence, log
        self._inbox, self._metrics = inbox, metrics
        self._folder = HeldFolder(config.run.folder)
        self.stop = asyncio.Event()
        self.leased: set[L] = set()
        self.results: asyncio.Queue[tuple[L, Finished]] = asyncio.Queue()
        self.slot_freed = asyncio.Event()

    @property
    def slots_taken(self) -> int:
        """Tasks being done now."""
        return sum(lease.takes_slot for lease in self.leased)

    @abstractmethod
    async def begin(self, group: asyncio.TaskGroup) -> bool:
        """Get ready before anything is leased, and start loops of one's own; False: the run is over."""

    @abstractmethod
    def room(self) -> int:
        """How many tasks may be leased now."""

    @abstractmethod
    async def next(self, n: int) -> list[Delivery[Any]]:
        """Lease up to `n` tasks; waits a little if there is none."""

    @abstractmethod
    async def prepare(self, leases: Sequence[L]) -> None:
        """Read what new tasks need, for all of them at once."""

    @abstractmethod
    async def do(self, lease: L) -> Finished:
        """Produce the result of one task; an exception is a failed attempt."""

    @abstractmethod
    async def give_up(self, lease: L, failure: Failure, reason: str) -> Finished:
        """The result of a task that was tried for the last time."""

    @abstractmethod
    async def report(self) -> None:
        """Publish the process's status, over and over."""

    @abstractmethod
    async def close(self) -> None:
        """Close what the tasks have used."""

    async def beaten(self, pulse: Pulse) -> None:
        """Act on the reply to a heartbeat."""

    def overdue(self, lease: L) -> str:
        """Why a task that is still being done has failed nevertheless; empty where it has not."""
        return ""

    def was_named(self, reason: str) -> bool:
        """Whether a failure is one that the log has warned of."""
        return False

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
        if not await self.begin(group):
            self.stop.set()
            return
        for loop in (self._lease_tasks, self._send_results, self._heartbeat, self.report):
            group.create_task(loop())

    async def _lease_tasks(self) -> None:
        while True:
            room = self.room()
            if room <= 0:
                self.slot_freed.clear()
                await self.slot_freed.wait()
                continue
            with self._metrics.waiting_for_tasks(idle=not self.slots_taken):
                deliveries = await self._take(room)
            leases = [self.kind(delivery) for delivery in deliveries]
            self.leased.update(leases)
            await self.prepare(leases)
            for lease in leases:
                self._start_job(lease, self._do(lease))

    async def _take(self, n: int) -> list[Delivery[Any]]:
        """Take new tasks; if the process stops meanwhile, those of a read under way are still handed back."""
        reading = asyncio.ensure_future(self.next(n))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            self.leased.update(map(self.kind, await reading))
            raise

    def _start_job(self, lease: L, work: Coroutine[Any, Any, None]) -> None:
        lease.job = asyncio.create_task(work)
        lease.job.add_done_callback(partial(self._job_ended, lease))

    def _job_ended(self, lease: L, _: asyncio.Task[None]) -> None:
        if lease.taken_over:
            self.leased.discard(lease)
        self._free_slot(lease)

    def _free_slot(self, lease: L) -> None:
        lease.takes_slot = False
        self.slot_freed.set()

    async def _do(self, lease: L) -> None:
        """Produce the result of one task. A failure that is not the model's is retried or skipped, never counted."""
        tried = lease.delivery.attempt - 1
        try:
            if tried >= self.config.generator.max_attempts:
                who = self._inbox.stage.group
                reason = f"given up after {tried} attempts: the {who} died or hung"
                result = await self.give_up(lease, Failure.GENERATORS_LOST, reason)
            else:
                result = await self.do(lease)
        except EngineDied:
            return  # `Engine.watch` ends the process, which hands everything back
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            await self.failed(lease, Failure.CANCELLED, "it was cancelled from within")
            return
        except BaseException as error:  # a Rust extension's panic is no Exception
            await self.failed(lease, failure_of(error), f"{type(error).__name__}: {error}")
            return
        self.results.put_nowait((lease, result))

    async def failed(self, lease: L, failure: Failure, reason: str) -> None:
        """Requeue a task after a pause, during which its slot is free, or skip it after its last attempt."""
        config, delivery, attempt = self.config.generator, lease.delivery, lease.delivery.attempt
        self._metrics.failed += 1
        warn = self.log.info if self.was_named(reason) else self.log.warning
        warn(self.failure, task=delivery.task.task_id, attempt=attempt, error=reason)
        if attempt >= config.max_attempts:
            self.results.put_nowait((lease, await self.give_up(lease, failure, reason)))
            return
        lease.delivery = dataclasses.replace(delivery, attempt=attempt + 1)
        self._free_slot(lease)
        await asyncio.sleep(config.retry_pause * 2 ** (attempt - 1))
        await in_thread(self._inbox.requeue, [lease.delivery])
        self.leased.discard(lease)

    async def _send_results(self) -> None:
        """Send results as they come; those that gather during one call are sent together in the next."""
        while True:
            batch = [await self.results.get()]
            while len(batch) < MAX_RESULTS_A_CALL and not self.results.empty():
                batch.append(self.results.get_nowait())
            await asyncio.shield(self._store(batch))

    async def _store(self, batch: list[tuple[L, Finished]]) -> None:
        accepted = await in_thread(self._inbox.finish, [result for _, result in batch])
        if accepted < len(batch):
            # Another process finished them, or their evaluation was started again.
            self.log.warning("results of tasks leased here are no longer wanted", tasks=len(batch) - accepted)
        self.leased.difference_update(lease for lease, _ in batch)

    async def _heartbeat(self) -> None:
        """Renew the leases, drop the tasks that others have taken over, and stop when the run is finished."""
        while True:
            self._folder.check()
            leases = {lease.delivery.entry_id: lease for lease in self.leased if not lease.taken_over}
            pulse = await in_thread(self._inbox.beat, list(leases))
            for entry_id in pulse.lost:
                # Finished meanwhile, taken over because this process was silent for too long, or no longer wanted.
                lease = leases[entry_id]
                if lease.job and not lease.job.done():
                    self.log.warning("task is no longer leased here", task=lease.delivery.task.task_id)
                    lease.taken_over = True
                    lease.job.cancel()
            await self.beaten(pulse)
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
            elif reason := self.overdue(lease):
                failure = Failure.TIMED_OUT
                job.cancel()
            else:
                continue
            self._start_job(lease, self.failed(lease, failure, reason))

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
            returned = await in_thread(self._inbox.requeue, unfinished)
            self.log.info("handed back unfinished tasks", tasks=returned)
            self.leased.clear()
        await self.close()
        await in_thread(self._inbox.leave)


async def serve(worker: Worker[Any], broker: Broker, log: Any) -> None:
    """Run a worker until it ends or the process is asked to stop (SIGTERM, Ctrl-C); raises like `Worker.run`.

    The process crashes if its event loop stands still.
    """

    def stop() -> None:
        worker.stop.set()
        broker.patience.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    tune_interpreter()
    watching = asyncio.create_task(watch())
    try:
        await worker.run()
    except UserError:
        raise  # `entry_point` says it
    except Exception as error:
        log.error("failed", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        watching.cancel()


def _is_cancelled() -> bool:
    """Tell whether the current task is asked to end; a `CancelledError` may also come from code that cancels itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
