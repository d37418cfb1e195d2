"""The sampler's loop: read what came in, count it, close batches, dispatch tasks, and write the round at once."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from common.config import Config
from common.errors import UserError
from common.messages import SampleHeader, Step, Task
from common.metrics import MetricsWriter
from common.streams.broker import Broker
from common.streams.ledger import Commit, SamplerLedger
from common.streams.presence import Presence
from common.streams.steps import StepReader
from sampler import checkpoint
from sampler.admission import Admission
from sampler.batches import OpenBatch
from sampler.drift import DriftMeter
from sampler.evaluation import Evaluations
from sampler.initial_values import apply_initial_values
from sampler.metrics import Figures, shown, staleness
from sampler.patience import Patience
from sampler.prompts import PromptSet
from sampler.restart import BEFORE_FIRST_STEP, restore, resume
from sampler.rollouts import Rollouts
from sampler.state import InFlight, OpenSample, Row
from sampler.tracker import ValueTracker

READ = 512  # headers of one round
DISPATCH = 1024  # tasks of one round
BLOCK_MS = 20  # how late a step may be noticed while samples are awaited
IDLE_MS = 200
LOGGED_EVERY = 5.0  # seconds between progress lines


class Sampler:
    """One run's prompts, tracker, admission and batches. What it decides reaches Redis by `write` alone."""

    def __init__(
        self,
        config: Config,
        broker: Broker,
        ledger: SamplerLedger,
        prompts: PromptSet,
        heldout: PromptSet | None,
        presence: Presence,
        log: Any,
    ) -> None:
        sampler, folder = config.sampler, config.run.folder
        self.config, self.broker, self.ledger, self.presence, self.log = config, broker, ledger, presence, log
        self.prompts = prompts
        self.tracker = ValueTracker(prompts.ids, sampler.tracker, sampler.selection)
        if sampler.initial_values is not None:
            apply_initial_values(sampler.initial_values, self.tracker, prompts, log)
        self.meter = DriftMeter(sampler.drift, len(prompts))
        self.admission = Admission(sampler.batch_size, sampler.max_staleness, config.run.steps)
        self.open = OpenBatch(sampler.batch_size, sampler.max_staleness, sampler.advantage)
        full_reward = sampler.tracker.reward_range[1]
        self.evaluations = Evaluations(heldout, config.eval, config.run.steps, full_reward, folder / "validation_data")
        self.rollouts = Rollouts(folder / "rollouts", config.episode.rollouts_every)
        self.checkpoints = folder / "checkpoints" / "tracker"
        self.steps = StepReader(broker)
        self.version = BEFORE_FIRST_STEP
        self.next_task = 0
        self.arrivals = 0
        self.patience = Patience(sampler)
        self.figures = Figures(recent=sampler.batch_size)
        self.writer = MetricsWriter(folder / "tensorboard" / "sampler")
        self.stop = threading.Event()
        self._changed: set[int] = set()  # tracker rows changed in this round
        self._last_commit = self._told = self._logged = time.monotonic()

    def run(self) -> None:
        """Work until the run is over, or until `stop` is set.

        Raises:
            UserError: a reward is outside the declared range, no prompt is left, or nothing is answered any more.
            LeaseLost: another sampler has taken over.
            OutOfStep: Redis lost what this process had written; start again from what Redis has.
        """
        self.begin()
        while not self.stop.is_set() and not self.over():
            self.round()
            self.tell()
        if self.over():
            self.save_checkpoint(self.version)
            self.broker.finish()
            self.tell(now=True)
            self.log.info("run is finished", version=self.version, counters=self.broker.counters())

    def begin(self) -> None:
        """Become the run's sampler and take over where the last one left it."""
        restore(self, self.ledger.acquire())

    def round(self) -> None:
        """One round, committed as a whole: killed anywhere before the last line, nothing of it happened."""
        commit = Commit()
        samples, steps = self.read()
        for step in steps:
            self.take_step(step, commit)
        evaluated: dict[int, list[SampleHeader]] = defaultdict(list)
        for entry_id, header in samples:
            commit.counted.append(entry_id)
            self.count(header, commit, evaluated)
        self.finish_evaluations(evaluated, commit)
        self.rollouts.write()
        if self.version > BEFORE_FIRST_STEP:
            self.close_batches(commit)
            self.dispatch(commit)
        self.write(commit, due=bool(steps))
        # What has failed is written, so that whoever starts this run again does not meet it again.
        self.patience.check()

    def read(self) -> tuple[list[tuple[str, SampleHeader]], list[Step]]:
        """What has come in; waits a little for the first, of samples or, where none is on its way, of steps.

        Steps are read after the samples, so that the drift of every version that answered is known.
        """
        started = time.monotonic()
        if self.admission.in_flight:
            samples, cause = self.ledger.read(READ, BLOCK_MS), "generators"
            steps = self.steps.read()
        else:
            samples, cause = self.ledger.read(READ, 0), "learner"
            steps = self.steps.read(block_ms=0 if samples else IDLE_MS)
        if not samples:
            self.figures.waited[cause] += time.monotonic() - started
        return samples, steps

    def take_step(self, step: Step, commit: Commit) -> None:
        """The learner has published a version."""
        if self.version == BEFORE_FIRST_STEP:
            self.log.info("the learner is ready", version=step.version)
            self.rollouts.discard(step.version)
            resume(self, step.version)
        if self.meter.record(step.version, step.drift):
            commit.scalars[f"moved:{step.version}"] = self.meter.moved(step.version)
        if step.checkpoint:
            self.save_checkpoint(step.version)
        # A learner that restarted from a checkpoint repeats versions; none of their batches is made again.
        self.version = max(self.version, step.version)
        self.open.next_id = max(self.open.next_id, step.version)
        if self.evaluations.due(step.version):
            self.evaluate(step.version, commit)

    def count(self, header: SampleHeader, commit: Commit, evaluated: dict[int, list[SampleHeader]]) -> None:
        """A header counts once: in the tracker and the open batch, or in its evaluation."""
        memo = self.admission.arrived(header.task_id)
        if memo is None:
            # A task played again from the dead letters: it was counted as set aside.
            self._note(commit, "ignored")
            return
        commit.outstanding_remove.append(header.task_id)
        self.patience.saw(header)
        if memo.evaluation:
            evaluated[memo.version].append(header)
            return
        if self.rollouts.wants(memo, header):
            self.rollouts.add(memo, header, self.asked(memo.prompt_id))
        if header.status == "set_aside":
            self.set_aside(memo, header, commit)
        elif memo.prompt_id in self.tracker.index:
            self.learn(memo, header, commit)
        else:
            # The data lost this prompt while its answer was on the way.
            self._note(commit, "ignored")
            commit.unlink.append(header.task_id)

    def learn(self, memo: InFlight, header: SampleHeader, commit: Commit) -> None:
        """A reward informs the tracker; its sample waits for a batch."""
        tracker, i = self.tracker, self.tracker.index[memo.prompt_id]
        drift = self.meter.measure(i, header.drift, header.newest_version)
        rho = tracker.rho(drift) if self.meter.rho is None else self.meter.rho
        try:
            baseline = tracker.update(memo.prompt_id, header.reward, rho=rho)
        except ValueError as error:
            raise UserError(f"{error} (prompt {memo.prompt_id}); declare the range of your rewards there") from None
        if self.config.sampler.advantage.baseline == "dispatch":
            baseline = memo.baseline
        self._changed.add(i)
        effective = tracker.alpha.item(i) + tracker.beta.item(i)
        self.figures.counted(header.reward, header.reward_parts, drift, rho, effective)
        sample = OpenSample(
            header.task_id,
            self.arrivals,
            tracker.rescale(header.reward) - baseline,
            header.reward,
            header.tokens,
            header.model_tokens,
            header.oldest_version,
            max(self.version, 0),
        )
        self.arrivals += 1
        self.open.add(sample)
        commit.open_add[sample.sample_id] = sample.pack()
        self._note(commit, "rewarded")

    def set_aside(self, memo: InFlight, header: SampleHeader, commit: Commit) -> None:
        """A task nobody could answer says nothing about the policy; another one takes its place."""
        self.log.warning("task set aside", task=header.task_id, prompt=memo.prompt_id, reason=header.reason)
        self._note(commit, "set_aside")
        if header.retire and memo.prompt_id in self.tracker.index:
            self.tracker.retire(memo.prompt_id)
            self._changed.add(self.tracker.index[memo.prompt_id])
            self._note(commit, "retired")
            if self.tracker.retired.all():
                raise UserError(f"no prompt of {self.config.data.train} can be answered; the last one: {header.reason}")

    def close_batches(self, commit: Commit) -> None:
        """Close every batch that is full and waits for nobody."""
        while True:
            for sample in self.open.drop_late():
                self._forget(sample.sample_id, commit)
                commit.unlink.append(sample.sample_id)
                self._note(commit, "late")
            if not self.open.full() or self.admission.awaited(self.open.next_id, self.open.versions):
                return
            closed = self.open.close()
            for sample_id in closed.manifest.sample_ids:
                self._forget(sample_id, commit)
            commit.batches.append(closed.manifest)
            self._note(commit, "batched", len(closed.manifest.sample_ids))
            step = closed.manifest.batch_id
            self.writer.write(step, self.figures.of_batch(closed))
            for name, versions in staleness(closed).items():
                self.writer.histogram(step, f"staleness/{name}", Counter(versions))

    def evaluate(self, version: int, commit: Commit) -> None:
        """Send the held-out prompts along, to be answered with this version or a newer one."""
        tasks = self.evaluations.tasks(version)
        for task in tasks:
            self._send(task, InFlight(task.prompt_id, True, version, 0.0), commit)
        commit.scalars[f"evaluation:{version}"] = self.evaluations.tallies[version].pack()
        self.log.info("evaluating", version=version, tasks=len(tasks))

    def finish_evaluations(self, evaluated: dict[int, list[SampleHeader]], commit: Commit) -> None:
        """Count held-out answers; a complete evaluation is told to all."""
        for version, headers in evaluated.items():
            for header in headers:
                tally = self.evaluations.count(version, header)
            commit.scalars[f"evaluation:{version}"] = tally.pack()
            self._note(commit, "evaluated", len(headers))
            self.evaluations.write_rows(version, headers)
            if tally.complete:
                commit.evaluations[version] = self.evaluations.result(version)
                self.writer.write(version, {"heldout/accuracy": tally.accuracy, "heldout/set_aside": tally.set_aside})
                self.log.info(
                    "evaluated", version=version, accuracy=tally.accuracy, samples=tally.answered,
                    set_aside=tally.set_aside,
                )  # fmt: skip

    def dispatch(self, commit: Commit) -> None:
        """Send as many new tasks as admission allows."""
        batches, waiting = self.open.next_id, len(self.open)
        n = min(DISPATCH, self.admission.room(self.version, batches, waiting))
        if n == 0:
            return
        # A seed of its own for every round: a restarted sampler draws what the killed one would have drawn.
        rng = np.random.default_rng([self.config.run.seed, self.next_task])
        drawn = self.tracker.draw(n, rng, self.admission.busy(self.tracker.index)).tolist()
        for position, i in enumerate(drawn, self.admission.promised(batches, waiting)):
            found = self.prompts[i]
            task = Task(
                task_id=f"t{self.next_task:07d}",
                prompt_id=self.prompts.ids[i],
                prompt=found.prompt,
                answer=found.answer,
                row=found.row,
                min_version=self.admission.min_version(position),
                keep=self.rollouts.chosen(self.version),
            )
            self.next_task += 1
            self._send(task, InFlight(task.prompt_id, False, self.version, self.tracker.value(task.prompt_id)), commit)

    def write(self, commit: Commit, due: bool) -> None:
        """Commit the round; one that changed nothing, and is not `due`, only renews the lease now and then."""
        for i in self._changed:
            commit.tracker[self.tracker.prompt_ids[i]] = self.row(i).pack()
        self._changed.clear()
        now = time.monotonic()
        if not commit and not due and now - self._last_commit < self.broker.dead_after / 4:
            return
        commit.scalars |= {
            "version": self.version,
            "next_batch": self.open.next_id,
            "next_task": self.next_task,
            "arrivals": self.arrivals,
            "steps_after": self.steps.last,
        }
        self.ledger.commit(commit)
        self._last_commit = now

    def over(self) -> bool:
        """Whether the learner has made its last step and nothing is on its way."""
        return self.version >= self.config.run.steps and not self.admission.in_flight

    def save_checkpoint(self, version: int) -> None:
        """Write the tracker beside the learner's checkpoint of a version."""
        path = checkpoint.path_of(self.checkpoints, version)
        checkpoint.save(path, self.tracker, self.meter, self.config.learner.keep_checkpoints)

    def tell(self, now: bool = False) -> None:
        """Progress, for the display every heartbeat and for the log now and then."""
        time_now = time.monotonic()
        if not now and time_now - self._told < self.config.broker.heartbeat:
            return
        self._told = time_now
        latest = self.evaluations.latest()
        values = shown(
            {
                "step": max(self.version, 0),
                "reward": self.figures.reward(),
                "accuracy": latest[1] if latest else None,
                "staleness": self.figures.staleness,
                "in_flight": len(self.admission.in_flight),
                "waiting": len(self.open),
                "samples_per_second": self.figures.rate(time_now),
                **self.figures.totals,
            }
        )
        if self.version > BEFORE_FIRST_STEP:
            outstanding = self.admission.promised(self.open.next_id - self.version, len(self.open))
            self.presence.status(state="running", outstanding=outstanding, **values)
            if now or time_now - self._logged > LOGGED_EVERY:
                self._logged = time_now
                self.log.info("progress", **values)

    def asked(self, prompt_id: str) -> dict[str, Any]:
        """A prompt and its answer, as rollouts name them."""
        i = self.tracker.index.get(prompt_id)
        return {} if i is None else {"input": self.prompts[i].prompt, "gts": self.prompts[i].answer}

    def row(self, i: int) -> Row:
        """What is kept of the prompt at index i."""
        alpha, beta, retired = self.tracker.row(i)
        return Row(alpha, beta, self.meter.answered.item(i), retired)

    def _send(self, task: Task, memo: InFlight, commit: Commit) -> None:
        self.admission.dispatched(task.task_id, memo)
        commit.dispatch.append((task, memo.pack()))

    def _forget(self, sample_id: str, commit: Commit) -> None:
        """Take a sample out of the open batch, as Redis has it."""
        if commit.open_add.pop(sample_id, None) is None:
            commit.open_remove.append(sample_id)

    def _note(self, commit: Commit, name: str, n: int = 1) -> None:
        commit.counters[name] = commit.counters.get(name, 0) + n
        self.figures.totals[name] += n
