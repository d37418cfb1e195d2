"""Admission: how many tasks may be outstanding, so that no sample is too old when it is trained on.

Version b trains on batch b, so a task dispatched at version v must be in batch v + max_staleness at the latest. At most
(max_staleness + 1) * batch_size samples are outstanding (dispatched and not yet trained on), so there is a place for
each in time. Newer samples may overtake a slow answer while later places remain for it; after that the batch waits for
it (`must_wait`). This bounds staleness without dropping slow, long answers.

A group is trained on as a whole: its age is that of its oldest member, and it reserves places for all members until the
last one has arrived. Batches hold whole groups, so these bounds hold for groups too. A group that has lost a member for
good is abandoned: none of its samples is trained on, whether arrived or still in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from common.config import SamplerConfig
from sampler.records import DispatchedTask, OpenSample


class Admission:
    """The tasks in flight, the groups they belong to, and the room for more.

    Attributes:
        steps: batches of the run; `SamplerState` lowers it when the run ends early.
        in_flight: every task whose header has not been counted, evaluation included.
        groups: groups that wait for members, by id; ungrouped responses are in none.
        busy: prompts of training tasks in flight, bool [N].
        training: tasks in flight that are not evaluation.
        arrived: samples that wait for other members of their group.

    Args:
        index: position of each prompt in the tracker, by its id.
        serial: dispatch one group at a time, so that each draw depends on all answers before it and nothing else.
    """

    def __init__(
        self, config: SamplerConfig, steps: int, responses: int = 1, index: Mapping[str, int] | None = None,
        serial: bool = False,
    ) -> None:  # fmt: skip
        self.steps = steps
        self.in_flight: dict[str, DispatchedTask] = {}
        self.groups: dict[str, Group] = {}
        self.training = 0
        self.arrived = 0
        self._batch_size = config.batch_size
        self._max_staleness = config.max_staleness
        self._responses = responses
        self._serial = serial
        self._versions: Counter[int] = Counter()  # places that groups will take, by their oldest version
        self._index = index or {}
        self.busy = np.zeros(len(self._index), bool)
        self._asked = np.zeros(len(self._index), np.int64)  # tasks in flight of each prompt, [N]

    def add(self, task_id: str, task: DispatchedTask) -> None:
        self.in_flight[task_id] = task
        if task.evaluation:
            return
        self.training += 1
        self._count_prompt(task.prompt_id, 1)
        if task.group:
            group = self.groups.setdefault(task.group, Group())
            group.tasks[task_id] = task.version
            self._recount(task.group, group)
        else:
            self._versions[task.version] += 1

    def remove(self, task_id: str) -> DispatchedTask | None:
        """Remove a task from those in flight and from its waiting group; None if it was not in flight."""
        task = self.in_flight.pop(task_id, None)
        if task is None or task.evaluation:
            return task
        self.training -= 1
        self._count_prompt(task.prompt_id, -1)
        if not task.group:
            _decrease(self._versions, task.version)
        elif task.group in self.groups:
            group = self.groups[task.group]
            del group.tasks[task_id]
            self._recount(task.group, group)
        return task

    def arrive(self, sample: OpenSample) -> list[OpenSample] | None:
        """Add a sample; returns its group if that is complete now, else an empty list, or None if it was abandoned."""
        if not sample.group:
            return [sample]
        group = self.groups.get(sample.group)
        if group is None:
            return None
        group.samples.append(sample)
        self.arrived += 1
        if len(group.samples) == self._responses:
            return self.pop_group(sample.group)
        self._recount(sample.group, group)
        return []

    def pop_group(self, group_id: str) -> list[OpenSample]:
        """Forget a group; returns its samples that have arrived."""
        group = self.groups.pop(group_id, None)
        if group is None:
            return []
        self.arrived -= len(group.samples)
        if group.oldest is not None:
            _decrease(self._versions, group.oldest, self._responses)
        return group.samples

    def late(self, oldest: int) -> list[str]:
        """Ids of the groups that hold a sample older than version `oldest`."""
        if not self.arrived or min(self._versions) >= oldest:
            return []
        return [
            group_id
            for group_id, group in self.groups.items()
            if any(sample.oldest_version < oldest for sample in group.samples)
        ]

    def restore(self, tasks: Mapping[str, DispatchedTask], samples: Iterable[OpenSample]) -> Iterator[list[OpenSample]]:
        """Restore the tasks in flight and the samples that had arrived; yields the complete groups."""
        for task_id, task in tasks.items():
            self.add(task_id, task)
        for sample in samples:
            if not sample.group:
                yield [sample]
                continue
            group = self.groups.setdefault(sample.group, Group())
            group.samples.append(sample)
            self.arrived += 1
            self._recount(sample.group, group)
        for group_id, group in list(self.groups.items()):
            if not group.tasks:
                yield self.pop_group(group_id)
            elif len(group.tasks) + len(group.samples) < self._responses:
                # The group was abandoned before: the results of its tasks in flight will be ignored.
                self.pop_group(group_id)

    def total(self, batches: int, waiting: int) -> int:
        """Samples that have been trained on or will be: in closed batches, in the open one, in groups, in flight."""
        return batches * self._batch_size + waiting + self.arrived + self.training

    def room(self, version: int, batches: int, waiting: int) -> int:
        """Tasks that may be dispatched now, given the newest version and the arguments of `total`."""
        if self._serial and self.in_flight:
            return 0
        # At most this many samples fit into the batches up to `version + max_staleness`, so none of them can be late.
        allowed = min(version + self._max_staleness + 1, self.steps) * self._batch_size
        room = max(0, allowed - self.total(batches, waiting))
        return min(room, self._responses) if self._serial else room

    def min_version(self, position: int) -> int:
        """Oldest weights that may answer the run's task at this position; older ones would be late."""
        return max(0, position // self._batch_size - self._max_staleness)

    def must_wait(self, batch_id: int, open_versions: Counter[int]) -> bool:
        """Whether closing this batch now would leave some group without a place in time.

        Args:
            open_versions: samples that wait for a batch, by the version of the oldest token of their group.
        """
        for later in range(self._max_staleness + 1):
            # Samples this old must be in one of the next 1 + later batches.
            oldest = batch_id + later - self._max_staleness
            in_flight = sum(n for version, n in self._versions.items() if version <= oldest)
            # `later` batches remain for them after this one.
            if in_flight > later * self._batch_size:
                waiting = sum(n for version, n in open_versions.items() if version <= oldest)
                # A batch takes the oldest samples first: if it is full of samples as old, waiting makes no room.
                if waiting < self._batch_size:
                    return True
        return False

    def _count_prompt(self, prompt_id: str, n: int) -> None:
        i = self._index.get(prompt_id)
        if i is not None:
            asked = self._asked.item(i) + n
            self._asked[i], self.busy[i] = asked, asked > 0

    def _recount(self, group_id: str, group: Group) -> None:
        """Move a group's places to its current oldest version; remove a group without members."""
        # Tasks in flight bring no tokens older than their dispatch.
        versions = (*group.tasks.values(), *(sample.oldest_version for sample in group.samples))
        oldest = min(versions, default=None)
        if oldest == group.oldest:
            return
        if group.oldest is not None:
            _decrease(self._versions, group.oldest, self._responses)
        group.oldest = oldest
        if oldest is None:
            del self.groups[group_id]
        else:
            self._versions[oldest] += self._responses


def _decrease(counts: Counter, key: object, n: int = 1) -> None:
    counts[key] -= n
    if not counts[key]:
        del counts[key]


@dataclass(slots=True)
class Group:
    """Responses of one prompt whose rewards are compared with each other; some of them are in flight."""

    tasks: dict[str, int] = field(default_factory=dict)  # version at dispatch of each task in flight
    samples: list[OpenSample] = field(default_factory=list)  # arrived
    oldest: int | None = None  # version at which `Admission` counts the group's places
