"""The sampler's loop: read results, count them, close batches, dispatch tasks, and commit the round as a whole."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
from redis.exceptions import RedisError

from common.config import Config
from common.errors import UserError
from common.held_folder import HeldFolder
from common.messages import Failure, InvalidMessage, SampleHeader, Step, Task
from common.streams.lease import RedisBehind
from common.streams.ledger import SamplerLedger
from common.streams.presence import LearnerWatch, Presence
from common.streams.steps import StepReader
from sampler.answers import Answers
from sampler.evaluation import Evaluations
from sampler.files.answer_file import Request
from sampler.files.episode_files import Rollouts
from sampler.files.snapshots import Snapshots
from sampler.lost_tasks import LostTasks
from sampler.memory_watch import MemoryWatch
from sampler.metrics import SamplerMetrics
from sampler.mixture import Mixture
from sampler.process_metrics import SamplerTimeline
from sampler.prompts.prompt_set import RunData
from sampler.records import DispatchedTask, OpenSample
from sampler.results import EqualRewards, FailureLimit, checked, refused
from sampler.scores import apply_initial_values
from sampler.seeds import task_seed
from sampler.state import BEFORE_FIRST_STEP, SamplerState
from sampler.values.traits import prompt_traits

MAX_HEADERS = 512  # read in one round
MAX_DISPATCH = 1024  # tasks sent in one round
BLOCK_MS = 20  # longest delay in noticing a step while waiting for samples
IDLE_MS = 200
LOG_INTERVAL = 5.0  # seconds between progress lines
ALLOCATIONS_PER_COLLECTION = 20_000  # of Python's garbage collector
MAX_REPLACEMENTS = 2  # of one member of a group; then the group is abandoned


class Sampler:
    """A run's sampler. Each round records its decisions in the state; only `write` sends them to Redis.

    Args:
        request: the prompts to answer in a run without training steps.
    """

    def __init__(
        self, config: Config, data: RunData, ledger: SamplerLedger, presence: Presence, log: Any,
        request: Request | None = None,
    ) -> None:  # fmt: skip
        self.config, self.ledger, self.presence, self.log = config, ledger, presence, log
        self.prompts = data.train
        self.mixture = Mixture([part.source.weight for part in data.train.parts], data.train.starts)
        self.evaluations: Evaluations | Answers
        if request is None:
            self.state = SamplerState(config, data.train.ids, prompt_traits(data.train, config.sampler.tracker, log))
            self.evaluations = Evaluations(config, data.heldout, self.state, ledger, log)
            if config.sampler.initial_values is not None:
                apply_initial_values(config.sampler.initial_values, self.state.tracker, data.train, log)
        else:
            self.state = SamplerState(config, data.train.ids)
            self.evaluations = Answers(config, data.train, request, self.state, log)
        self.steps = StepReader(ledger.broker)
        self.snapshots = Snapshots(config, self.state, ledger, log)
        self.rollouts = Rollouts(config.run.folder / "rollouts", config.episode.rollouts_every, config.run.keep_bytes)
        self.failures, self.equal_rewards = FailureLimit(config.sampler), EqualRewards(log)
        self.lost = LostTasks(ledger)
        self.learner = LearnerWatch(ledger.broker, log)
        self.metrics = SamplerMetrics(config, self.state, log)
        self.timeline = SamplerTimeline(config.run.folder)
        self.serial = config.run.deterministic
        self.folder = HeldFolder(config.run.folder)
        self.stop = threading.Event()
        self.memory = MemoryWatch(ledger.broker, log)
        self._last_commit = self._last_report = self._last_log = time.monotonic()

    def run(self) -> None:
        """Work until the run is over, or until `stop` is set.

        Raises:
            UserError: no usable prompt is left, too many tasks in a row failed, or the run folder is gone.
            LeaseLost: another sampler has taken over.
            RedisBehind: Redis lacks a part of the run; start it again from the newest checkpoint.
        """
        self.begin()
        # Rounds create no reference cycles, so garbage collections would visit every prompt and task and free nothing.
        gc.collect()
        gc.freeze()
        gc.set_threshold(ALLOCATIONS_PER_COLLECTION)
        while not self.stop.is_set() and not self.over():
            self.round()
            self.report()
        if self.over():
            if self.config.run.has_learner:
                self.snapshots.save(self.state.version)
                self.ledger.broker.finish()
            self.report(now=True)
            self.log.info("run is finished", version=self.state.version, counters=self.ledger.broker.counters())

    def begin(self) -> None:
        """Become the run's sampler, and continue where the last one stopped."""
        state, saved = self.state, self.ledger.acquire()
        self.metrics.open()
        if state.restore(saved):
            self.snapshots.check()
            self.steps = StepReader(self.ledger.broker, after=state.last_step)
            self.rollouts.withdraw(state)
            self.evaluations.withdraw()
            self.log.info(
                "continuing the run", version=state.version, batches=state.open.next_id, waiting=len(state.open),
                in_flight=len(state.admission.in_flight),
            )  # fmt: skip
        if not self.config.run.has_learner:
            self.evaluations.begin(state.version)
        elif state.version == BEFORE_FIRST_STEP:
            self.log.info("waiting for the learner")
            self.presence.status(state="waiting for the learner")

    def round(self) -> None:
        """Run one round and commit it as a whole; after a kill before `write`, the next sampler repeats it."""
        headers, steps = self.read()
        if headers or steps:
            # Files are written before the commit, so check first that no other sampler has taken over.
            self.ledger.renew()
        for step in steps:
            self.take_step(step)
        for entry_id, header in headers:
            self.count(entry_id, header)
        self.evaluate()
        self.rollouts.write()
        if self.state.version > BEFORE_FIRST_STEP:
            self.close_batches()
            self.dispatch()
            self.send_lost()
        self.metrics.write()
        self.write(due=bool(steps))
        # After the commit: all tasks in flight have been sent, and a restarted sampler reads no failure twice.
        evaluation = self.state.open_evaluation_name
        self.lost.search(self.state.admission.in_flight, evaluation)
        self.timeline.evaluating(evaluation)
        self.failures.check()

    def read(self) -> tuple[list[tuple[str, SampleHeader]], list[Step]]:
        """Read samples and steps; wait a little for the first sample or, if no task is in flight, for the first step.

        Steps are read after the samples, so that the drift of every version that answered is known. A deterministic run
        waits for the results of all tasks, and takes them in the order in which the tasks were sent.
        """
        started, in_flight = time.monotonic(), self.state.admission.in_flight
        if self.serial and self.ledger.arrived() < len(in_flight):
            headers, cause = [], "generators"
            steps = self.steps.read(block_ms=BLOCK_MS)
        elif in_flight:
            headers = self.ledger.read(max(MAX_HEADERS, self.config.algorithm.responses), BLOCK_MS)
            steps, cause = self.steps.read(), "generators"
        else:
            headers, cause = self.ledger.read(MAX_HEADERS, 0), "learner"
            steps = self.steps.read(block_ms=0 if headers else IDLE_MS)
        if self.serial:
            # Only the headers are reordered: one commit acknowledges all entry ids, whatever their order.
            # Ids end in numbers, so the shorter id is the earlier task.
            by_task = sorted((header for _, header in headers), key=lambda one: (len(one.task_id), one.task_id))
            headers = [(entry_id, header) for (entry_id, _), header in zip(headers, by_task, strict=True)]
        self.state.last_step = self.steps.last
        if not headers:
            seconds = time.monotonic() - started
            self.metrics.waited[cause] += seconds
            self.timeline.waited(cause, seconds)
        return headers, steps

    def take_step(self, step: Step) -> None:
        """Process a version that the learner has published; one beyond `run.steps` is ignored.

        Raises:
            RedisBehind: the learner has started from a checkpoint whose batches Redis lacks.
        """
        if step.version > self.config.run.steps:
            self.log.warning("a step beyond run.steps is ignored", version=step.version, steps=self.config.run.steps)
            return
        if self.state.version == BEFORE_FIRST_STEP:
            self.start_at(step.version)
        elif step.version > self.state.open.next_id:
            raise RedisBehind(f"Redis has no batch {self.state.open.next_id}, the learner is at {step.version}")
        self.metrics.trained(step)
        is_new = step.version > self.state.version
        self.state.record_step(step.version, step.drift)
        # A restarted learner announces versions again; their state was saved the first time.
        if step.checkpoint and (is_new or not self.snapshots.has(step.version)):
            self.snapshots.save(step.version)

    def start_at(self, version: int) -> None:
        """Start a run that Redis does not know at the learner's first version: anew, or from a checkpoint."""
        self.log.info("the learner is ready", version=version)
        resumed = self.snapshots.load(version)
        # Entries of later versions in the files belong to another run in this folder, or will be written again.
        self.snapshots.discard(version)
        self.rollouts.discard(version)
        self.metrics.discard(version)
        self.evaluations.begin(version, resumed)

    def count(self, entry_id: str, header: SampleHeader) -> None:
        """Count a header once: in the tracker and the open batch, or in its evaluation."""
        task = self.state.acknowledge(entry_id, header.task_id)
        if task is None:
            # A task replayed from the dead letters: it was counted as skipped, and its group continued without it.
            self.state.count("ignored")
            self.state.discard_payload(header.task_id)
            return
        try:
            self.count_result(task, checked(header, task, self.config))
            return
        except InvalidMessage as error:
            reason = str(error)
        except (UserError, RedisError):
            raise
        except Exception as error:
            # If this error ended the sampler, the next one would read the same header and fail in the same way.
            self.log.exception("a result could not be counted", task=header.task_id)
            reason = f"{type(error).__name__}: {error}"
        self.ledger.add_dead_letter(header, reason)
        self.count_result(task, refused(header, task, reason))

    def count_result(self, task: DispatchedTask, header: SampleHeader) -> None:
        """Count the result of a task that was in flight."""
        self.failures.add(header)
        if task.evaluation:
            self.evaluations.add(task.version, header)
            return
        i = self.state.tracker.index.get(task.prompt_id)
        if self.rollouts.wants(task, header):
            self.rollouts.add(task, header, {} if i is None else self.prompts[i].shown())
        if header.status == "set_aside":
            self.set_aside(i, task, header)
        elif i is not None:
            self.learn(i, task, header)
        else:
            # The prompt was removed from the data while its task was in flight.
            self.state.count("ignored")
            self.state.discard_payload(header.task_id)
            self.state.abandon_group(task.group)

    def learn(self, i: int, task: DispatchedTask, header: SampleHeader) -> None:
        """Update the value of prompt i with a reward, and add the sample to those that wait for a batch."""
        state = self.state
        visit = state.update_value(i, header)
        self.equal_rewards.add(header)
        self.metrics.add(header, visit, self.prompts.source(i))
        state.add_sample(
            OpenSample(
                sample_id=header.task_id,
                arrival=state.arrivals,
                baseline=visit.value_mean if self.config.algorithm.method == "spo" else 0.0,
                reward=header.reward,
                tokens=header.tokens,
                model_tokens=header.model_tokens,
                oldest_version=header.oldest_version,
                counted_at=max(state.version, 0),
                turn_returns=header.turn_returns,
                turn_tokens=header.turn_tokens,
                group=task.group,
                kept=self.rollouts.is_chosen(task.version),
                row_tokens=header.row_tokens,
            )
        )
        state.count("rewarded")

    def set_aside(self, i: int | None, task: DispatchedTask, header: SampleHeader) -> None:
        """Count a skipped task; admission makes room for another one.

        The rewards of a group are compared with each other, so a skipped member is replaced here by a task of the same
        prompt; if that is not possible, the group is abandoned.
        """
        state = self.state
        state.discard_payload(header.task_id)  # a result that could not be counted may have tokens
        self.log.warning("task skipped", task=header.task_id, prompt=task.prompt_id, reason=header.reason)
        state.count("set_aside")
        state.count(f"set_aside.{header.failure or Failure.OTHER}")
        if header.retire and i is not None and not state.tracker.retired[i]:
            state.retire(i)
            state.count("retired")
            if state.tracker.retired.all():
                names = ", ".join(part.source.shown() for part in self.prompts.parts)
                raise UserError(f"no prompt of {names} can be answered; the last one: {header.reason}")
        if task.group in state.admission.groups:
            if i is None or state.tracker.retired[i] or task.replacements == MAX_REPLACEMENTS:
                state.abandon_group(task.group)
            else:
                self.send(i, state.position, task.group, task.replacements + 1)

    def close_batches(self) -> None:
        """Close every batch that is full and need not wait for a task in flight."""
        state = self.state
        state.drop_late()
        while state.open.full() and not state.admission.must_wait(state.open.next_id, state.open.versions):
            self.timeline.instant("batch", batch=state.open.next_id)
            closed = state.close_batch()
            self.metrics.batch_closed(closed)
            self.equal_rewards.batch_closed(closed.manifest.rewards)
            state.drop_late()

    def evaluate(self) -> None:
        """Write the round's held-out answers, report a completed evaluation, and start the next."""
        last = self.state.last_version
        if complete := self.evaluations.write():
            counts, figures = complete
            self.metrics.evaluated(counts, figures)
            self.log.info(
                "evaluated", version=counts.version, accuracy=counts.accuracy, samples=counts.answered,
                set_aside=counts.set_aside,
            )  # fmt: skip
        if self.state.last_version < last:
            self.log.info(f"the run ends at step {self.state.last_version}: {self.state.early_stop}")
        # After the learner's last step no memory is freed any more, and answers to held-out tasks bring no payload.
        is_last = self.config.run.has_learner and self.state.version >= self.state.last_version
        if is_last or not self.memory.is_short():
            self.evaluations.start_due()

    def dispatch(self) -> None:
        """Send as many new tasks as admission allows, all tasks of a group together."""
        state, admission, tracker = self.state, self.state.admission, self.state.tracker
        responses = self.config.algorithm.responses
        room = admission.room(state.version, state.open.next_id, len(state.open))
        n = min(max(1, MAX_DISPATCH // responses), room // responses)
        if n == 0 or self.memory.is_short():
            return
        if self.serial:
            tracker.forget_weights()
        # Each round has its own seed, so that a restarted sampler draws what the killed one would have drawn.
        rng = np.random.default_rng([self.config.run.seed, state.next_task])
        drawn = self.mixture.draw(tracker, n, rng, admission.busy, first=state.next_task // responses)
        for i in drawn.tolist():
            group, last = state.next_task_id if responses > 1 else "", state.position + responses - 1
            for _ in range(responses):
                self.send(i, last, group)

    def send(self, i: int, position: int, group: str, replacements: int = 0) -> None:
        """Send a task of the prompt at index i; `position` is that of the last task in its group."""
        state, prompt_id = self.state, self.prompts.ids[i]
        value = state.tracker.value(prompt_id)
        task = self.task(i, state.next_task_id, position, state.version)
        state.dispatch(task, DispatchedTask(prompt_id, False, state.version, value, group, replacements))

    def task(self, i: int, task_id: str, position: int, version: int) -> Task:
        """A training task of the prompt at index i, dispatched at `version`."""
        min_version, keep = self.state.admission.min_version(position), self.rollouts.is_chosen(version)
        seed = task_seed(self.config.run, task_id)
        return self.prompts.task(i, task_id, min_version=min_version, keep=keep, seed=seed)

    def send_lost(self) -> None:
        """Send again the tasks that Redis has lost; they are trained on later, so they may require newer weights."""
        state, in_flight = self.state, self.state.admission.in_flight
        lost = [task_id for task_id in self.lost.ids if task_id in in_flight]
        for task_id in lost:
            task = in_flight[task_id]
            i = state.tracker.index.get(task.prompt_id)
            if task.evaluation:
                self.evaluations.send_again(task_id)
            elif i is None:
                state.abandon_task(task_id)
            else:
                state.send_again(self.task(i, task_id, state.position - 1, task.version))
        if lost:
            self.log.warning("tasks had vanished from redis and are sent again", tasks=len(lost), first=lost[0])

    def write(self, due: bool) -> None:
        """Commit the round. If nothing changed and it is not `due`, commit only often enough to keep the lease."""
        now = time.monotonic()
        if due or self.state.has_changed() or now - self._last_commit > self.ledger.broker.dead_after / 4:
            self.ledger.commit(self.state.take_commit())
            self._last_commit = now

    def over(self) -> bool:
        """Whether the learner has made its last step, all tasks have been sent, and none is in flight."""
        is_last = self.state.version >= self.state.last_version and self.evaluations.all_sent()
        return is_last and not self.state.admission.in_flight

    def report(self, now: bool = False) -> None:
        """Report progress: to the display every heartbeat, to the log every `LOG_INTERVAL`."""
        seconds = time.monotonic()
        if not now and seconds - self._last_report < self.config.broker.heartbeat:
            return
        self._last_report = seconds
        self.folder.check()
        if self.config.run.has_learner and not self.state.admission.in_flight:
            self.learner.look()
        values = self.metrics.progress()
        if self.state.version > BEFORE_FIRST_STEP:
            self.metrics.observe(self.ledger.broker, now)
            state, shown = self.state, "waiting for memory" if self.memory.was_short else "running"
            self.presence.status(state=shown, outstanding=state.outstanding, evaluating=state.evaluating, **values)
            if now or seconds - self._last_log > LOG_INTERVAL:
                self._last_log = seconds
                self.log.info("progress", **values)
