"""The generators' side: lease tasks, those of an evaluation first, and finish each once, or set it aside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from common.messages import Failure, SampleHeader, Task
from common.payload import Payload
from common.streams.broker import Broker
from common.streams.inbox import Delivery, Finished, Inbox, Stage, pairs, readable

GROUP = "generators"
TRAINING = "tasks"  # stream of the training tasks; each evaluation has one of its own
STAGE = Stage(TRAINING, GROUP, "task", Task)


class Lease(NamedTuple):
    """Tasks leased to a generator, and the evaluation that it may answer while it keeps its version; "": none."""

    evaluation: str
    deliveries: list[Delivery[Task]]


class TaskInbox(Inbox[Task]):
    """One generator's share of the tasks."""

    def __init__(self, broker: Broker, name: str) -> None:
        super().__init__(broker, name, STAGE)

    def lease(self, version: int, n: int, training: int) -> Lease:
        """Up to `n` new tasks, those of the open evaluation first, and at most `training` of the others.

        Args:
            version: weights that this generator has and keeps until no evaluation is under way; -1 for none.
        """
        self._appear()
        names = (TRAINING, "state", "pin:", STAGE.holders)
        name, *replies, unknown = self._call("lease", names, [GROUP, self.consumer, version, n, training])
        evaluation = name.decode()
        self._notice(unknown)
        deliveries: list[Delivery[Task]] = []
        for stream, entries in zip((self._stream(evaluation), TRAINING), replies, strict=True):
            deliveries += self._read(stream, [(entry_id, pairs(fields)) for entry_id, fields in entries])
        return Lease(evaluation, deliveries)

    def set_aside(
        self, delivery: Delivery[Task], failure: Failure, reason: str, *, retire: bool = False, **fields: Any
    ) -> Finished:
        """The result of a task that cannot be answered: it has no reward, and the task is kept as a dead letter.

        `retire`: the prompt can never be answered. `fields`: header fields that say how far the episode came.
        """
        task, reason = delivery.task, readable(reason)
        fields |= {"prompt_id": task.prompt_id, "kind": task.kind, "retire": retire, "generator": self.name}
        header = SampleHeader.skipped(task.task_id, failure, reason, **fields)
        return Finished(delivery.entry_id, header, dead_letter=self._letter(delivery, reason))

    def previous(self, prompt_ids: Sequence[str]) -> list[Payload | None]:
        """Each prompt's previous response, to measure drift on; None at its first visit."""
        return self._broker.payloads("previous", prompt_ids)
