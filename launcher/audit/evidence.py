"""Derives from a run's records where its counts begin, the history of each task, and a replay of the tracker."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np

from common.config import Config
from common.streams.ledger import JournalEntry
from launcher.audit.records import FolderRecords, KeptEpisode, RedisRecords
from sampler.prompts.prompt_set import RunData
from sampler.records import tracker_rows
from sampler.scores import apply_initial_values
from sampler.tracker import ValueTracker
from sampler.values.traits import prompt_traits


@dataclass(frozen=True, slots=True)
class Start:
    """The state from which a run's counts begin: empty, or restored from the run folder after Redis was lost."""

    version: int  # of the weights, which is also the number of the first batch
    commits: int  # that restored it
    rows: Mapping[str, bytes]  # of the tracker, packed, by prompt id
    population: bytes | None  # the state of the prior, if the run had one

    @classmethod
    def of(cls, journal: Sequence[JournalEntry]) -> Self:
        """Read from the journal. A restoration that was cut off is repeated, with the same values."""
        rows: dict[str, bytes] = {}
        values: dict[str, Any] = {}
        commits = max((i + 1 for i, entry in enumerate(journal) if entry.restored), default=0)
        for entry in journal[:commits]:
            rows |= entry.restored.get("rows", {})
            values |= entry.restored
        return cls(values.get("version", 0), commits, rows, values.get("population"))


@dataclass(slots=True)
class Course:
    """When each task was sent and counted, by the journal."""

    sent: dict[str, int] = field(default_factory=dict)  # version of the weights when it was sent first, by task id
    counted: dict[str, int] = field(default_factory=dict)  # index of the commit that counted it, by task id
    resent: int = 0  # how often tasks were sent again while they were awaited
    wrongly_sent: list[str] = field(default_factory=list)  # after their end
    wrongly_counted: list[str] = field(default_factory=list)  # twice, or without having been sent

    @classmethod
    def of(cls, journal: Sequence[JournalEntry]) -> Self:
        course = cls()
        for place, entry in enumerate(journal):
            for task_id in entry.dispatched:
                if task_id in course.counted:
                    course.wrongly_sent.append(task_id)
                elif task_id in course.sent:
                    course.resent += 1
                course.sent.setdefault(task_id, entry.version)
            for task_id in entry.counted:
                if task_id in course.counted or task_id not in course.sent:
                    course.wrongly_counted.append(task_id)
                course.counted[task_id] = place
        return course


@dataclass(frozen=True)
class Evidence:
    """Everything that the audit of a run reads."""

    config: Config
    data: RunData
    redis: RedisRecords
    folder: FolderRecords
    log: Any

    @property
    def journal(self) -> list[JournalEntry]:
        return self.redis.journal

    @cached_property
    def start(self) -> Start:
        return Start.of(self.journal)

    @cached_property
    def course(self) -> Course:
        return Course.of(self.journal)

    @cached_property
    def replay(self) -> Replay:
        return Replay(self)

    @cached_property
    def rewards(self) -> dict[str, tuple[str, float]]:
        """Prompt id and reward of each rewarded sample."""
        return {
            task_id: (prompt_id, reward) for entry in self.journal for prompt_id, reward, _, task_id in entry.rewards
        }

    def mean_reward(self, batch: int) -> float:
        rewards = [self.rewards[sample_id][1] for sample_id in self.batches[batch] if sample_id in self.rewards]
        return math.fsum(rewards) / len(rewards) if rewards else math.nan

    @cached_property
    def batches(self) -> dict[int, Sequence[str]]:
        """Sample ids of each batch, by its number."""
        return {number: sample_ids for entry in self.journal for number, sample_ids in entry.batches}

    @cached_property
    def batch_of(self) -> dict[str, int]:
        return {sample_id: number for number, sample_ids in self.batches.items() for sample_id in sample_ids}

    @cached_property
    def kept(self) -> dict[str, KeptEpisode]:
        """Training episodes in the run folder, by task id."""
        return {episode.task_id: episode for episode in self.folder.rollouts}

    @cached_property
    def trained(self) -> int:
        """The newest version that the learner has announced."""
        return max((step.version for step in self.redis.steps), default=self.start.version)

    @property
    def last_version(self) -> int:
        """The version at which the run ends."""
        return self.redis.early_stop.last_version(self.config.run.steps, self.config.run.stop_when)

    def unchanged_since(self, *keys: str) -> int:
        """The first batch made with the present values of these settings."""
        return max(self.folder.changed.get(key, 0) for key in keys)

    def total(self, counter: str) -> int:
        """The amount that the commits after a restoration added to a counter."""
        return sum(entry.counters.get(counter, 0) for entry in self.journal[self.start.commits :])


class Replay:
    """A new tracker that counts the rewards of the journal in order.

    Attributes:
        sent: value of the prompt when the task was sent first, by task id; only of tasks that were rewarded.
        arrived: value of the prompt just before the task's reward was counted, by task id.
        unknown: prompts that are not in the data any more.
    """

    def __init__(self, evidence: Evidence) -> None:
        config, data = evidence.config.sampler, evidence.data.train
        traits = prompt_traits(data, config.tracker, evidence.log)
        tracker = self.tracker = ValueTracker(data.ids, config.tracker, config.selection, traits)
        self.sent: dict[str, float] = {}
        self.arrived: dict[str, float] = {}
        self.unknown: set[str] = set()
        if config.initial_values is not None:
            apply_initial_values(config.initial_values, tracker, data, evidence.log)
        start = evidence.start
        rows = {prompt_id: row for prompt_id, row in start.rows.items() if prompt_id in tracker.index}
        prompts = np.array([tracker.index[prompt_id] for prompt_id in rows], np.int64)
        tracker.restore_rows(prompts, tracker_rows(rows.values()))
        if tracker.population is not None and start.population is not None:
            tracker.population.unpack(start.population)
        for entry in evidence.journal:
            for prompt_id, reward, rho, task_id in entry.rewards:
                if prompt_id in tracker.index:
                    self.arrived[task_id] = tracker.update(prompt_id, reward, rho=rho)
                else:
                    self.unknown.add(prompt_id)
            for task_id in entry.dispatched:
                prompt_id, _ = evidence.rewards.get(task_id, ("", 0.0))
                if prompt_id in tracker.index:
                    self.sent.setdefault(task_id, tracker.value(prompt_id))
