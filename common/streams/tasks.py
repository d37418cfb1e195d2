"""The generators' side: lease tasks, renew the leases, finish each task once, or put it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.messages import InvalidMessage, SampleHeader, Task
from common.payload import Payload, encode_payload
from common.streams import dead
from common.streams.broker import Broker

GROUP = "generators"
# A script holds up all others while it runs, so many large payloads go in several calls.
CALL_BYTES = 1 << 20
MAX_REASON = 2000  # characters


@dataclass(frozen=True, slots=True)
class Delivery:
    """A task leased to this generator; `attempt` counts from 1 and grows with every failure or takeover."""

    entry_id: str
    task: Task
    attempt: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A task's result. `keep` stores the response as its prompt's previous one too, to measure drift on."""

    entry_id: str
    header: SampleHeader
    payload: Payload | None = None
    keep: bool = False
    dead_letter: bytes = b""


class TaskInbox:
    """One generator's share of the `tasks` stream."""

    def __init__(self, broker: Broker, consumer: str) -> None:
        self._broker = broker
        self.consumer = consumer
        self._silence_ms = int(1000 * broker.dead_after)
        self._tasks = broker.key("tasks")
        broker.ensure_group("tasks", GROUP)

    def take(self, n: int, block_ms: int = 1000) -> list[Delivery]:
        """Up to `n` new tasks, waiting up to `block_ms` for the first."""
        return self._read(self._broker.read_group("tasks", GROUP, self.consumer, count=n, block_ms=block_ms), {})

    def adopt(self, n: int) -> list[Delivery]:
        """Up to `n` tasks of generators whose heartbeat has stopped."""
        redis = self._broker.redis
        entries = redis.xautoclaim(self._tasks, GROUP, self.consumer, self._silence_ms, "0-0", count=n)[1]
        entries = [entry for entry in entries if entry[0] is not None]
        if not entries:
            self._broker.script("leave")([self._tasks], [GROUP, "", 60 * self._silence_ms])
            return []
        pending = redis.xpending_range(self._tasks, GROUP, entries[0][0], entries[-1][0], len(entries), self.consumer)
        return self._read(entries, {item["message_id"]: item["times_delivered"] - 1 for item in pending})

    def beat(self, entry_ids: Sequence[str]) -> set[str]:
        """Renew the lease of these tasks; returns those that another generator has taken over."""
        if not entry_ids:
            return set()
        return {
            entry.decode() for entry in self._broker.script("beat")([self._tasks], [GROUP, self.consumer, *entry_ids])
        }

    def finish(self, results: Sequence[Finished]) -> int:
        """Store results; returns how many were the first for their task. The others change nothing."""
        accepted, size = 0, 0
        arguments: list[Any] = []
        for result in results:
            header = result.header
            payload = encode_payload(result.payload) if result.payload is not None else b""
            kept_for = header.prompt_id if result.keep else b""
            packed = header.pack()
            arguments += (result.entry_id, header.task_id, packed, payload, kept_for, result.dead_letter)
            size += len(packed) + len(payload)
            if size > CALL_BYTES:
                accepted += self._finish(arguments)
                arguments, size = [], 0
        return accepted + self._finish(arguments)

    def _finish(self, arguments: list[Any]) -> int:
        if not arguments:
            return 0
        key = self._broker.key
        keys = [key("tasks"), key("samples"), key("counters"), key("dead"), key("payload:"), key("previous:")]
        return int(self._broker.script("finish")(keys, [GROUP, *arguments]))

    def set_aside(self, delivery: Delivery, reason: str, *, retire: bool = False, **fields: Any) -> Finished:
        """The result of a task that cannot be answered: it has no reward, and the task is kept as a dead letter.

        `retire`: the prompt can never be answered. `fields`: header fields that say how far the episode came.
        """
        task = delivery.task
        # It may quote what a model or a program wrote: anything, at any length.
        reason = reason.encode(errors="backslashreplace").decode()[:MAX_REASON]
        entry = {b"id": task.task_id.encode(), b"task": task.pack(), b"attempt": b"1"}
        header = SampleHeader(
            task_id=task.task_id,
            prompt_id=task.prompt_id,
            kind=task.kind,
            status="set_aside",
            reason=reason,
            retire=retire,
            generator=self.consumer,
            **fields,
        )
        return Finished(delivery.entry_id, header, dead_letter=dead.letter("tasks", reason, entry, self.consumer))

    def requeue(self, deliveries: Sequence[Delivery]) -> int:
        """Put tasks back, to be run as the attempt they name; returns how many were still leased by this one."""
        if not deliveries:
            return 0
        arguments: list[Any] = [GROUP]
        for delivery in deliveries:
            task = delivery.task
            arguments += (delivery.entry_id, task.task_id, task.pack(), delivery.attempt)
        return int(self._broker.script("requeue")([self._tasks], arguments))

    def previous(self, prompt_ids: Sequence[str]) -> list[Payload | None]:
        """Each prompt's previous response, to measure drift on; None at its first visit."""
        return self._broker.payloads("previous", prompt_ids)

    def leave(self) -> None:
        """Forget this consumer; to be called when it has no task left."""
        self._broker.script("leave")([self._tasks], [GROUP, self.consumer, 60 * self._silence_ms])

    def _read(
        self, entries: Sequence[tuple[bytes, dict[bytes, bytes]]], redelivered: dict[bytes, int]
    ) -> list[Delivery]:
        deliveries = []
        for entry_id, fields in entries:
            try:
                attempt = int(fields.get(b"attempt", b"1")) + redelivered.get(entry_id, 0)
                deliveries.append(Delivery(entry_id.decode(), Task.unpack(fields.get(b"task", b"")), attempt))
            except (InvalidMessage, ValueError) as error:
                self._bury(entry_id.decode(), fields, str(error))
        return deliveries

    def _bury(self, entry_id: str, fields: dict[bytes, bytes], reason: str) -> None:
        """An unreadable task: to the dead letters, and a header so that the sampler does not wait for it."""
        note = dead.letter("tasks", reason, fields, self.consumer)
        task_id = fields.get(b"id", b"").decode(errors="replace")
        if not task_id:
            dead.bury(self._broker, "tasks", GROUP, entry_id, note)
            return
        header = SampleHeader(task_id=task_id, prompt_id="", status="set_aside", reason=reason, generator=self.consumer)
        self.finish([Finished(entry_id, header, dead_letter=note)])
