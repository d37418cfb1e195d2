"""The sampler's state of a run, as one object: restored from Redis as a whole, and written round by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgpack
import numpy as np

from common.config import Config
from common.messages import SampleHeader, Task
from common.streams.early_stop import FIELD, EarlyStop
from common.streams.lease import LedgerState
from common.streams.ledger import Commit
from sampler.admission import Admission
from sampler.batches import ClosedBatch, OpenBatch
from sampler.records import TRACKER_ROWS, DispatchedTask, EvaluationCounts, OpenSample, packed_rows, tracker_rows
from sampler.tracker import Counts, ValueTracker, Visit
from sampler.values.drift import PromptDrift
from sampler.values.population import PromptTraits

BEFORE_FIRST_STEP = -1
ROWS_PER_COMMIT = 10_000
REFILL_LIMIT = 10  # most samples of degenerate groups that are replaced for one batch, as a multiple of its size


class SamplerState:
    """A run's state. Each method that changes it also adds the change to the round's commit, so that Redis follows
    memory.

    Attributes:
        version: newest weights announced.
        next_task: number of the next training task.
        arrivals: training samples counted.
        last_step: entry id of the last step that was read.
        refilled: samples of degenerate groups that were replaced since the last batch.
        evaluations: by the version at which each was due; only the last one can be incomplete.
        evaluated_to: versions up to this one need no evaluation any more.
        early_stop: the best held-out reward, and the end that `run.stop_when` led to.
        totals: counters of the run, as far as this process counted them.
    """

    def __init__(self, config: Config, prompt_ids: Sequence[str], traits: PromptTraits | None = None) -> None:
        sampler = config.sampler
        self.version = BEFORE_FIRST_STEP if config.run.has_learner else 0
        self.next_task = 0
        self.arrivals = 0
        self.last_step = "0"
        self.tracker = ValueTracker(prompt_ids, sampler.tracker, sampler.selection, traits)
        self.drift = PromptDrift(sampler.drift, len(prompt_ids))
        responses, serial = config.algorithm.responses, config.run.deterministic
        self.admission = Admission(sampler, config.run.steps, responses, self.tracker.index, serial)
        self.open = OpenBatch(sampler, config.algorithm)
        self.refilled = 0
        self.evaluations: dict[int, EvaluationCounts] = {}
        self.evaluated_to = BEFORE_FIRST_STEP
        self.early_stop = EarlyStop()
        self.totals: Counter[str] = Counter()
        self._run, self._batch_size, self._max_staleness = config.run, sampler.batch_size, sampler.max_staleness
        self._refill_limit = REFILL_LIMIT * sampler.batch_size * config.algorithm.refill_degenerate
        self._commit = Commit()
        self._changed_prompts: set[int] = set()

    @property
    def last_version(self) -> int:
        """The version at which the run ends: `run.steps`, or an earlier one."""
        return self.admission.steps

    @property
    def outstanding(self) -> int:
        """Samples dispatched and not yet trained on."""
        return self.admission.total(self.open.next_id - self.version, len(self.open))

    @property
    def position(self) -> int:
        """The next training task's place in the order of training."""
        return self.admission.total(self.open.next_id, len(self.open))

    @property
    def next_task_id(self) -> str:
        return f"t{self.next_task:07d}"

    def awaits(self, task_id: str) -> bool:
        """Whether a training task is in flight or has yet to be dispatched."""
        number = task_id.removeprefix("t")
        return task_id in self.admission.in_flight or (number.isdecimal() and int(number) >= self.next_task)

    def dispatch(self, task: Task, dispatched: DispatchedTask) -> None:
        self.next_task += not dispatched.evaluation
        self.admission.add(task.task_id, dispatched)
        self._commit.dispatch.append((task, dispatched.pack()))

    def send_again(self, task: Task) -> None:
        """Send a task in flight once more, because Redis has lost it; it still counts as one task."""
        self._commit.dispatch.append((task, self.admission.in_flight[task.task_id].pack()))
        self.count("dispatched", -1)  # commit.lua counts every task that it sends as dispatched
        self.count("sent_again")

    def abandon_task(self, task_id: str) -> None:
        """Count as skipped a task that Redis has lost and that cannot be sent again."""
        task = self.admission.remove(task_id)
        self._commit.outstanding_remove.append(task_id)
        for name in ("counted", "set_aside", "lost"):
            self.count(name)
        if task is not None:
            self.abandon_group(task.group)

    def acknowledge(self, entry_id: str, task_id: str) -> DispatchedTask | None:
        """Count a header; None if its task is not in flight."""
        self._commit.counted.append(entry_id)
        task = self.admission.remove(task_id)
        if task is not None:
            self._commit.outstanding_remove.append(task_id)
        return task

    def record_step(self, version: int, drift: float) -> None:
        """Record a version from the learner; one that a restarted learner announces again changes nothing."""
        if self.drift.record(version, drift):
            self._commit.scalars[f"moved:{version}"] = self.drift.cumulative(version)
        self.version = max(self.version, version)
        # A learner that starts from a checkpoint has trained on the batches before this version.
        self.open.next_id = max(self.open.next_id, version)

    def update_value(self, i: int, header: SampleHeader) -> Visit:
        """Count the reward of a response to the prompt at index i; raises ValueError outside the declared range."""
        tracker, prompt_id = self.tracker, self.tracker.prompt_ids[i]
        drift = self.drift.measure(i, header.drift, header.newest_version)
        rho = tracker.rho(drift) if self.drift.rho is None else self.drift.rho
        is_clipped = self.drift.rho is None and tracker.is_clipped(drift)
        (alpha, beta), is_first = tracker.counts(prompt_id), not tracker.visits[i]
        value = tracker.update(prompt_id, header.reward, rho=rho)
        self._commit.rewards.append((prompt_id, header.reward, rho, header.task_id))
        self._changed_prompts.add(i)
        n_eff = sum(tracker.counts(prompt_id))
        return Visit(drift, rho, n_eff, alpha, beta, value, float(is_clipped), float(is_first))

    def retire(self, i: int) -> None:
        self.tracker.retire(self.tracker.prompt_ids[i])
        self._changed_prompts.add(i)

    def add_sample(self, sample: OpenSample) -> None:
        """Add a counted sample to its group, and a complete group to the open batch."""
        self.arrivals += 1
        group = self.admission.arrive(sample)
        if group is None:
            self.discard_payload(sample.sample_id)
            self.count("abandoned")
            return
        self._commit.open_add[sample.sample_id] = sample.pack()
        if group and not self._is_refilled(group):
            self.open.add(*group)

    def abandon_group(self, group_id: str) -> None:
        """Drop a group that has lost a member for good."""
        self._drop(self.admission.pop_group(group_id), "abandoned")

    def drop_late(self) -> None:
        """Drop the groups that are too old for the next batch."""
        self._drop(self.open.drop_late(), "late")
        for group_id in self.admission.late(self.open.next_id - self._max_staleness):
            self._drop(self.admission.pop_group(group_id), "late")

    def close_batch(self) -> ClosedBatch:
        """Send the next batch to the learner."""
        closed = self.open.take_next()
        self.refilled = 0
        for sample in closed.samples:
            self._leave_open(sample)
        self._commit.batches.append(closed.manifest)
        self.count("batched", len(closed.samples))
        return closed

    def discard_payload(self, sample_id: str) -> None:
        """Delete the tokens of a sample that will not be trained on."""
        self._commit.unlink.append(sample_id)

    @property
    def open_evaluation(self) -> int | None:
        """Version at which the incomplete evaluation was due; None if there is none."""
        due = max(self.evaluations, default=None)
        return None if due is None or self.evaluations[due].complete else due

    @property
    def open_evaluation_name(self) -> str:
        """Name of the incomplete evaluation; "" if there is none."""
        due = self.open_evaluation
        return "" if due is None else self.evaluation_name(due)

    @property
    def latest_accuracy(self) -> float | None:
        complete = {due: counts for due, counts in self.evaluations.items() if counts.complete}
        return complete[max(complete)].accuracy if complete else None

    @property
    def evaluating(self) -> str | None:
        """Progress of the open evaluation as answers (skipped tasks included) of all, `3/9`; None if none is open."""
        due = self.open_evaluation
        if due is None:
            return None
        counts = self.evaluations[due]
        return f"{counts.answered + counts.set_aside}/{counts.expected}"

    def evaluation_name(self, due: int) -> str:
        """Name of an evaluation, which is the prefix of its task ids; every restart gives it a new name."""
        restarts = self.evaluations[due].restarts
        return f"e{due}.{restarts}" if restarts else f"e{due}"

    def start_evaluation(self, due: int, expected: int) -> None:
        """Start or restart an evaluation: expect this many answers, all from one version, `due` or a newer one."""
        restarts = 0
        if due in self.evaluations:
            old = self.evaluations[due]
            restarts = old.restarts + 1
            self._commit.closed.append(self.evaluation_name(due))
            for task_id in [name for name, task in self.admission.in_flight.items() if task.evaluation]:
                self.admission.remove(task_id)
                self._commit.outstanding_remove.append(task_id)
            if counted := old.answered + old.set_aside:
                self.count("evaluated", -counted)
                self.count("ignored", counted)
        self.evaluations[due] = EvaluationCounts(expected, restarts=restarts)
        self.evaluated_to = max(self.evaluated_to, due)
        self._commit.scalars |= {"evaluating": self.evaluation_name(due), "evaluating_from": due}
        self.save_evaluation(due)

    def save_evaluation(self, due: int) -> None:
        self._commit.scalars[f"evaluation:{due}"] = self.evaluations[due].pack()

    def save_answers(self, answered: int, reasons: Mapping[str, int]) -> None:
        """Publish how many answers the file of a run without training steps has, and why tasks were skipped."""
        self._commit.scalars |= {"answered": answered, "reasons": msgpack.packb(dict(reasons))}

    def restore_evaluations(self, counts: Mapping[int, EvaluationCounts], results: Mapping[int, bytes]) -> None:
        """Restore evaluations, by the version at which each was due, and results, by the version that answered."""
        self.evaluations = dict(counts)
        for due in counts:
            self.save_evaluation(due)
        self._commit.evaluations |= results

    def note_restored(self, version: int) -> None:
        """Record that the run resumes at this version with the counts restored so far: audits begin here."""
        self._commit.restored = {"version": version}

    def finish_evaluation(self, due: int, figures: dict[str, float]) -> None:
        """Publish a complete evaluation, and end the run if too many were no better than the best.

        The run then ends with the batches that the samples dispatched so far fill, so that none of them is wasted.
        """
        counts = self.evaluations[due]
        self.evaluated_to = max(self.evaluated_to, counts.version)
        self._commit.evaluations[counts.version] = msgpack.packb(
            {
                "version": counts.version,
                "accuracy": counts.accuracy,
                "reward": figures["reward"],
                "samples": counts.answered,
                "set_aside": counts.set_aside,
                "figures": figures,
            }
        )
        self._commit.closed.append(self.evaluation_name(due))
        self._commit.scalars["evaluating"] = ""
        stop, end = self.early_stop, -(-self.position // self._batch_size)
        stop.add(counts.version, figures["reward"])
        if not stop.end and stop.is_due(self._run.stop_when) and end < self._run.steps:
            stop.end = self.admission.steps = end

    def restore_early_stop(self, packed: bytes) -> None:
        """Restore the best reward, and the end if it also holds with the present `run.stop_when`."""
        stop = self.early_stop = EarlyStop.unpack(packed)
        stop.end = stop.end if stop.holds(self._run.stop_when) else 0
        self.admission.steps = stop.last_version(self._run.steps, self._run.stop_when)

    def count(self, name: str, n: int = 1) -> None:
        self._commit.counters[name] = self._commit.counters.get(name, 0) + n
        self.totals[name] += n

    def has_changed(self) -> bool:
        return bool(self._commit or self._changed_prompts)

    def take_commit(self) -> Commit:
        """Take all changes since the last call, to be written as a whole."""
        commit, self._commit = self._commit, Commit()
        commit.tracker = self._packed_rows([*self._changed_prompts])
        if self._changed_prompts:
            commit.scalars |= self._population()
        self._changed_prompts.clear()
        commit.scalars |= {
            "version": self.version,
            "next_batch": self.open.next_id,
            "next_task": self.next_task,
            "arrivals": self.arrivals,
            "last_step": self.last_step,
            "refilled": self.refilled,
            "evaluated_to": self.evaluated_to,
            FIELD: self.early_stop.pack(),
        }
        return commit

    def restore(self, saved: LedgerState) -> bool:
        """Continue where the last commit left the run; False if there is no commit yet."""
        scalars = saved.scalars
        if int(scalars.get("version", BEFORE_FIRST_STEP)) == BEFORE_FIRST_STEP:
            return False
        self.version = int(scalars["version"])
        self.open.next_id = int(scalars["next_batch"])
        self.next_task = int(scalars["next_task"])
        self.arrivals = int(scalars["arrivals"])
        self.last_step = scalars["last_step"].decode()
        self.refilled = int(scalars["refilled"])
        self.evaluated_to = int(scalars["evaluated_to"])
        self.restore_early_stop(scalars[FIELD])
        for version, data in _by_version(scalars, "evaluation:").items():
            self.evaluations[version] = EvaluationCounts.unpack(data)
        moved = _by_version(scalars, "moved:")
        cumulative = np.zeros(max(moved, default=0) + 1)
        for version, total in moved.items():
            cumulative[version] = float(total)
        # Versions that were skipped (`PromptDrift.record`) have no entry; their total is that of the version before.
        self.drift.restore(np.maximum.accumulate(cumulative))
        self._restore_tracker(saved.tracker)
        if self.tracker.population is not None and "population" in scalars:
            self.tracker.population.unpack(scalars["population"])
        in_flight = {task_id: DispatchedTask.unpack(data) for task_id, data in saved.outstanding.items()}
        arrived = sorted(map(OpenSample.unpack, saved.open.values()), key=lambda sample: sample.arrival)
        for group in self.admission.restore(in_flight, arrived):
            self.open.add(*group)
        return True

    def _restore_tracker(self, packed: Mapping[str, bytes]) -> None:
        """Restore the rows of prompts that are still in the data."""
        index = self.tracker.index
        prompts = np.fromiter((index.get(prompt_id, -1) for prompt_id in packed), np.int64, len(packed))
        in_data, rows = prompts >= 0, tracker_rows(packed.values())
        self.tracker.restore_rows(prompts[in_data], rows[in_data])
        self.drift.answered[prompts[in_data]] = rows["answered"][in_data]

    def tracker_commits(self) -> Iterator[Commit]:
        """The whole tracker in commits of limited size, for an empty Redis."""
        changed = np.flatnonzero((self.drift.answered >= 0) | self.tracker.retired).tolist()
        for start in range(0, len(changed), ROWS_PER_COMMIT):
            rows = self._packed_rows(changed[start : start + ROWS_PER_COMMIT])
            yield Commit(tracker=rows, restored={"rows": rows})
        moved = {f"moved:{v}": total for v, total in enumerate(self.drift.by_version().tolist())}
        yield Commit(scalars={**moved, **self._population()}, restored=dict(self._population()))

    def _packed_rows(self, prompts: Sequence[int]) -> dict[str, bytes]:
        indices = np.array(prompts, np.int64)
        rows = np.empty(len(indices), TRACKER_ROWS)
        for name in Counts._fields:
            rows[name] = getattr(self.tracker, name)[indices]
        rows["answered"] = self.drift.answered[indices]
        return dict(zip(map(self.tracker.prompt_ids.__getitem__, prompts), packed_rows(rows), strict=True))

    def _population(self) -> dict[str, bytes]:
        population = self.tracker.population
        return {} if population is None else {"population": population.pack()}

    def _is_refilled(self, group: list[OpenSample]) -> bool:
        """Count a complete group; True if it was degenerate and, within the limit, dropped to make room for others."""
        if len(group) == 1:
            return False
        self.count("grouped", len(group))
        if any(sample.reward != group[0].reward for sample in group):
            return False
        self.count("degenerate", len(group))
        if self.refilled + len(group) > self._refill_limit:
            return False
        self.refilled += len(group)
        self._drop(group, "refilled")
        return True

    def _drop(self, samples: Iterable[OpenSample], counter: str) -> None:
        """Remove samples that will not be trained on, and count them."""
        for sample in samples:
            self._leave_open(sample)
            self.discard_payload(sample.sample_id)
            self.count(counter)

    def _leave_open(self, sample: OpenSample) -> None:
        # A sample that was added in this round is not in Redis yet, so there is nothing to remove.
        if self._commit.open_add.pop(sample.sample_id, None) is None:
            self._commit.open_remove.append(sample.sample_id)


def _by_version(scalars: dict[str, bytes], prefix: str) -> dict[int, bytes]:
    return {int(name.removeprefix(prefix)): value for name, value in scalars.items() if name.startswith(prefix)}
