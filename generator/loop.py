"""The generator's loop: take tasks, play episodes, send results, and keep the weights fresh meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from common.config import Config
from common.messages import SampleHeader, Task
from common.payload import Payload
from common.streams.broker import Broker
from common.streams.presence import Presence
from common.streams.tasks import Delivery, Finished, TaskInbox
from common.threads import in_thread
from generator.concurrency import offload
from generator.engine.engine import Engine, EngineDied
from generator.episode import Episode
from generator.episode_parts import EpisodeParts
from generator.episode_record import make_record, wanted
from generator.episode_runner import PromptTooLong, make_runner
from generator.metrics import GeneratorMetrics
from generator.rescore import rescore
from generator.rewards import Outcome, Score
from generator.weights.logprob_check import LogprobCheck
from generator.weights.weight_client import WeightClient, Weights

FLUSH = 64
BLOCK_MS = 500


class Generator:
    """Plays up to `generator.max_concurrency` episodes at once until the run is finished or `stop` is set."""

    def __init__(
        self,
        config: Config,
        broker: Broker,
        inbox: TaskInbox,
        engine: Engine,
        weights: WeightClient,
        presence: Presence,
        meter: GeneratorMetrics,
        log: Any,
        parts: EpisodeParts | None = None,
    ) -> None:
        self.parts = parts or EpisodeParts(config)
        self.runner = make_runner(config, engine, engine.tokenizer, self.parts)
        self.config, self.broker, self.inbox, self.engine = config, broker, inbox, engine
        self.weights, self.presence, self.meter, self.log = weights, presence, meter, log
        self.logprob_check = LogprobCheck(engine, config, log)
        self.stop = asyncio.Event()
        # Everything this process answers for: episodes being played, failed ones that wait, and results not yet sent.
        self.hands: dict[str, Delivery] = {}
        self.playing: dict[str, asyncio.Task[None]] = {}
        self.begun: dict[str, Episode] = {}
        self.resting: dict[str, asyncio.Task[None]] = {}
        self.results: asyncio.Queue[Finished] = asyncio.Queue()
        self.slot_freed = asyncio.Event()
        self.version_changed = asyncio.Condition()

    async def run(self) -> None:
        """Work until told to stop; what is unfinished then is handed back.

        Raises:
            EngineDied: vLLM is gone; a supervisor should start this process anew.
        """
        await self._until_stopped(self._load_newest())
        if not self.stop.is_set():
            self.log.info("ready", version=self.engine.version, concurrency=self.config.generator.max_concurrency)
            self.presence.status(state="running", version=self.engine.version)
            await self._until_stopped(self._feed(), self._send(), self._beat(), self._follow_weights(), self._tell())
        await self._hand_back()

    async def _until_stopped(self, *parts: Coroutine[Any, Any, None]) -> None:
        """Run parts side by side until `stop`, until one of them fails, or until all are done."""
        working = [asyncio.create_task(part) for part in parts]
        stopping = asyncio.create_task(self.stop.wait())
        everything: asyncio.Future[Any] = asyncio.gather(*working)
        await asyncio.wait([stopping, everything], return_when=asyncio.FIRST_COMPLETED)
        failure = everything.exception() if everything.done() else None
        for part in [*working, stopping]:
            part.cancel()
        await asyncio.gather(*working, stopping, everything, return_exceptions=True)
        if failure is not None:
            await self._hand_back()
            raise failure

    async def _feed(self) -> None:
        """Keep every slot busy; now and then look for tasks of generators that died."""
        adopt_at = 0.0
        while True:
            free = self.config.generator.max_concurrency - len(self.playing)
            if free <= 0:
                self.slot_freed.clear()
                await self.slot_freed.wait()
                continue
            deliveries: list[Delivery] = []
            if time.monotonic() >= adopt_at:
                deliveries = await in_thread(self.inbox.adopt, free)
                adopt_at = time.monotonic() + self.broker.dead_after / 2
                if deliveries:
                    self.log.warning("took over tasks of a dead generator", tasks=len(deliveries))
            if not deliveries:
                with self.meter.waiting_for_tasks(idle=not self.playing):
                    deliveries = await self._taken(free)
            await self._start(deliveries)

    async def _taken(self, free: int) -> list[Delivery]:
        """New tasks. A read that is under way when the generator stops still arrives, to be handed back."""
        reading = asyncio.ensure_future(in_thread(self.inbox.take, free, BLOCK_MS))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            self.hands.update({delivery.entry_id: delivery for delivery in await reading})
            raise

    async def _start(self, deliveries: list[Delivery]) -> None:
        self.hands.update({delivery.entry_id: delivery for delivery in deliveries})
        previous: list[Payload | None] = [None] * len(deliveries)
        if self.config.sampler.drift.mode == "rescore":
            train = [delivery.task.prompt_id for delivery in deliveries if delivery.task.kind == "train"]
            found = dict(zip(train, await in_thread(self.inbox.previous, train), strict=True))
            previous = [
                found.get(delivery.task.prompt_id) if delivery.task.kind == "train" else None for delivery in deliveries
            ]
        for delivery, before in zip(deliveries, previous, strict=True):
            episode = asyncio.create_task(self._answer(delivery, before))
            self.playing[delivery.entry_id] = episode
            episode.add_done_callback(partial(self._free, delivery.entry_id))

    def _free(self, entry_id: str, episode: asyncio.Task[None]) -> None:
        self.playing.pop(entry_id, None)
        self.begun.pop(entry_id, None)
        self.slot_freed.set()

    async def _answer(self, delivery: Delivery, previous: Payload | None) -> None:
        """Play one task to a result. Failing machinery is never a reward: the task is tried again, then set aside."""
        tried = delivery.attempt - 1
        try:
            if tried >= self.config.generator.max_attempts:
                reason = f"given up after {tried} attempts: whoever played it died, or was taken for dead"
                result = self.inbox.set_aside(delivery, reason)
            else:
                result = await self._play(delivery, previous)
        except PromptTooLong as error:
            result = self.inbox.set_aside(delivery, str(error), retire=True)
        except EngineDied:
            return  # the engine's own watch ends the process, which hands everything back
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            await self._failed(delivery, "it was cancelled from within")
            return
        except Exception as error:
            await self._failed(delivery, f"{type(error).__name__}: {error}")
            return
        self.results.put_nowait(result)

    async def _failed(self, delivery: Delivery, reason: str) -> None:
        """Have a task tried again after a pause, in which its place is free for others, or set it aside."""
        config, attempt = self.config.generator, delivery.attempt
        self.log.warning("episode failed", task=delivery.task.task_id, attempt=attempt, error=reason)
        if attempt >= config.max_attempts:
            self.results.put_nowait(self.inbox.set_aside(delivery, reason, **await self._remains(delivery)))
            return
        again = dataclasses.replace(delivery, attempt=attempt + 1)
        self.hands[delivery.entry_id] = again
        resting = asyncio.create_task(self._requeue(again, config.retry_pause * 2 ** (attempt - 1)))
        self.resting[delivery.entry_id] = resting
        resting.add_done_callback(lambda _: self.resting.pop(delivery.entry_id, None))

    async def _remains(self, delivery: Delivery) -> dict[str, Any]:
        """How far an episode came that has failed, and what was said in it; nothing where it did not begin."""
        episode = self.begun.get(delivery.entry_id)
        if episode is None:
            return {}
        known = {
            "tokens": episode.length,
            "model_tokens": episode.sampled,
            "turns": episode.turns,
            "tool_calls": episode.tool_calls,
        }
        if delivery.task.kind == "train" and self.config.episode.rollouts_every == 0:
            return known  # nobody would write it
        try:
            record = await offload.run(True, make_record, delivery.task, episode, self.runner.template, False)
        except Exception as error:  # a task must not be lost for the sake of what people may read of it
            self.log.warning("no record of a failed episode", task=delivery.task.task_id, error=repr(error))
            return known
        return known | {"record": record}

    async def _requeue(self, delivery: Delivery, pause: float) -> None:
        await asyncio.sleep(pause)
        await in_thread(self.inbox.requeue, [delivery])
        self.hands.pop(delivery.entry_id, None)

    async def _play(self, delivery: Delivery, previous: Payload | None) -> Finished:
        task, config = delivery.task, self.config
        begun = partial(self.begun.__setitem__, delivery.entry_id)
        await self._version_at_least(task.min_version)
        started = time.monotonic()
        moved: asyncio.Task[float] | None = None
        if previous is not None:
            moved = asyncio.create_task(rescore(self.engine, previous, config.sampler.drift.estimator))
        try:
            episode = await self.runner.play(task, begun, **self._sampling(task))
            score = await self.parts.scorer.score(self._outcome(task, episode))
            drift = await moved if moved else None
        finally:
            if moved:
                moved.cancel()
        seconds = time.monotonic() - started
        self.meter.finished(episode.sampled, episode.length)
        record = await self._record(task, episode) if wanted(task) else None
        return Finished(
            delivery.entry_id,
            self._header(task, episode, score, drift, seconds, record),
            episode.payload() if task.kind == "train" else None,
            keep=config.sampler.drift.mode == "rescore" and task.kind == "train",
        )

    def _sampling(self, task: Task) -> dict[str, Any]:
        source = self.config.eval if task.kind == "eval" else self.config.generator
        return {"temperature": source.temperature, "top_p": source.top_p, "top_k": source.top_k}

    def _outcome(self, task: Task, episode: Episode) -> Outcome:
        """What rewards see."""
        return Outcome(
            text=episode.answer,
            response=episode.response,
            answer=task.answer,
            row=task.row,
            prompt=task.prompt,
            tokens=episode.sampled,
            limit=self.config.episode.max_response_tokens,
            reason=episode.reason,
            turn_rewards=episode.transcript.turn_rewards(),
        )

    async def _record(self, task: Task, episode: Episode) -> bytes:
        """The episode for people to read."""
        long = episode.length > offload.LONG_TOKENS
        return await offload.run(long, make_record, task, episode, self.runner.template)

    def _header(
        self, task: Task, episode: Episode, score: Score, drift: float | None, seconds: float, record: bytes | None
    ) -> SampleHeader:
        versions = [version for version, _, _ in episode.versions]
        return SampleHeader(
            task_id=task.task_id,
            prompt_id=task.prompt_id,
            kind=task.kind,
            reason=episode.reason,
            reward=score.value,
            reward_parts=score.parts,
            tokens=episode.length,
            model_tokens=episode.sampled,
            oldest_version=min(versions),
            newest_version=max(versions),
            drift=drift,
            generator=self.inbox.consumer,
            turns=episode.turns,
            tool_calls=episode.tool_calls,
            seconds=seconds,
            turn_rewards=episode.transcript.turn_rewards(),
            record=record,
        )

    async def _send(self) -> None:
        """Send results as they come, as many at once as have gathered while the last ones were on their way."""
        while True:
            batch = [await self.results.get()]
            while len(batch) < FLUSH and not self.results.empty():
                batch.append(self.results.get_nowait())
            await asyncio.shield(self._finish(batch))

    async def _finish(self, batch: list[Finished]) -> None:
        accepted = await in_thread(self.inbox.finish, batch)
        if accepted < len(batch):
            self.log.warning("somebody else had finished tasks of ours", tasks=len(batch) - accepted)
        for result in batch:
            self.hands.pop(result.entry_id, None)

    async def _beat(self) -> None:
        """Keep what is in our hands ours, drop what was taken over, and leave when the run is over."""
        while True:
            for entry_id in await in_thread(self.inbox.beat, list(self.hands)):
                # Finished meanwhile, or taken over because we were silent for too long.
                if ours := self.playing.get(entry_id) or self.resting.get(entry_id):
                    self.log.warning("task was taken over by another generator", entry=entry_id)
                    self.hands.pop(entry_id, None)
                    ours.cancel()
            if await in_thread(self.broker.finished):
                self.log.info("run is finished")
                self.stop.set()
            self.engine.check()
            await asyncio.sleep(self.config.broker.heartbeat)

    async def _load_newest(self) -> None:
        """The first weights: whatever the learner serves now, once it does."""
        patience = 0.5
        while True:
            try:
                await self._load(await asyncio.wait_for(self.weights.next(), patience))
                return
            except TimeoutError:
                patience = 5.0
            self.log.info("waiting for the learner's weights")
            self.presence.status(state="waiting for weights")
            if await in_thread(self.broker.finished):
                self.stop.set()
                return

    async def _follow_weights(self) -> None:
        while True:
            await self._load(await self.weights.next())

    async def _load(self, weights: Weights) -> None:
        """Put pulled weights into the engine: the only time generation pauses."""
        with contextlib.closing(weights):
            pause = await self.engine.load(weights.version, weights)
        await self.logprob_check.after_update(weights.manifest)
        self.meter.updated(pulled=self.weights.stats.seconds, pause=pause)
        self.log.debug("weights", version=weights.version, pause=pause)
        self.presence.status(version=weights.version, source=self.weights.stats.source)
        async with self.version_changed:
            self.version_changed.notify_all()

    async def _version_at_least(self, version: int) -> None:
        async with self.version_changed:
            await self.version_changed.wait_for(lambda: self.engine.version >= version)

    async def _tell(self) -> None:
        """Status for the display and metrics for TensorBoard."""
        while True:
            await asyncio.sleep(self.config.broker.heartbeat)
            self.presence.status(**self.meter.status(), playing=len(self.playing))
            self.meter.write(self.engine.version)

    async def _hand_back(self) -> None:
        """Send what is finished and give the rest back to the others."""
        ours = [*self.playing.values(), *self.resting.values()]
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)
        while not self.results.empty():
            await self._finish([self.results.get_nowait()])
        unfinished = list(self.hands.values())
        if unfinished:
            returned = await in_thread(self.inbox.requeue, unfinished)
            self.log.info("handed back unfinished tasks", tasks=returned)
            self.hands.clear()
        await self.parts.close()
        await in_thread(self.inbox.leave)


def _is_cancelled() -> bool:
    """Whether somebody wants the current task to end; a cancellation may also come from what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
