"""The generators' side: lease tasks, those of an evaluation first, and finish or skip each exactly once."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from common.messages import Failure, InvalidMessage, SampleHeader, Task
from common.payload import Payload, encode_payload
from common.streams import dead
from common.streams.broker import Broker

# Redis does nothing else while a script runs, so many large payloads go in several calls.
CALL_BYTES = 1 << 20
MAX_REASON = 2000  # characters
LEASES_A_CALL = 1000  # checked by one call of a script

CONSUMER_GROUP = "generators"
TRAINING = "tasks"  # stream of the training tasks; each evaluation has one of its own, `tasks:EVALUATION`
HOLDERS = "holders:tasks"  # key with the last heartbeat of each generator that may have leases
TAKEOVERS = "takeovers:tasks"  # key that says how often each generator has lost leases to others

T = TypeVar("T")


class EntryId(NamedTuple):
    """Where a leased task is: the name of its stream, and its id there."""

    stream: str
    id: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """A task leased to this generator; `attempt` counts from 1 and grows with every failure or takeover."""

    entry_id: EntryId
    task: Task
    attempt: int


class Lease(NamedTuple):
    """Tasks leased to a generator, and the evaluation that it may answer while it keeps its version ("" if none)."""

    evaluation: str
    deliveries: list[Delivery]


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a leased task; with `for_drift` the response is stored as its prompt's previous one."""

    entry_id: EntryId
    header: SampleHeader
    payload: Payload | None = None
    for_drift: bool = False
    dead_letter: bytes = b""


class Pulse(NamedTuple):
    """The reply to a heartbeat."""

    lost: set[EntryId]  # held tasks that another process has taken over, or that are not needed any more
    finished: bool  # whether the run is over
    evaluation: str  # name of the one that is under way, or ""


class ServerClock:
    """Predicts Redis' clock from this process's monotonic clock."""

    def __init__(self, redis: Any, tolerance: float) -> None:
        """`tolerance`: seconds that a command may need until Redis reads its clock."""
        self._tolerance = tolerance
        asked = time.monotonic()
        seconds, micros = redis.time()
        self._ahead = seconds + micros / 1e6 - asked  # seconds, of this process's clock

    def expected(self) -> tuple[float, float]:
        """Earliest and latest time [s] that a command sent now reads from Redis' clock, unless that was set."""
        now = time.monotonic() + self._ahead
        return now - self._tolerance, now + self._tolerance

    def learn(self, seconds: float, asked: float) -> None:
        """Learn from a command sent at `asked` on this process's clock that read `seconds` on Redis'."""
        # Redis read its clock after the command was sent and before now. Slow commands tell less than fast ones.
        least, most = seconds - time.monotonic(), seconds - asked
        self._ahead = min(max(self._ahead, least), most)


class TaskInbox:
    """One generator's access to the stream of training tasks, and to those of the evaluations."""

    def __init__(self, broker: Broker, name: str) -> None:
        self._broker = broker
        # Differs at each start: the heartbeat of a restarted process must not renew what this one held.
        self.consumer = f"{name}:{os.urandom(4).hex()}"
        self.name = name
        self._silence_ms = int(1000 * broker.dead_after)
        self._clock = ServerClock(broker.redis, broker.dead_after / 2)
        self._takeovers = 0  # of tasks of this process
        self._look_again = False  # whether the next heartbeat checks every held task
        self._beaten = -math.inf  # time of its last heartbeat
        # Time before which no tasks are adopted: after an outage, silent processes may be alive.
        self._judges_from = -math.inf
        self._held: set[EntryId] = set()  # tasks reported with the last heartbeat
        self._delivered: set[EntryId] = set()  # tasks delivered since then
        broker.ensure_group(TRAINING, CONSUMER_GROUP)

    def lease(self, version: int, n: int, training: int) -> Lease:
        """Up to `n` new tasks, those of the open evaluation first, and at most `training` of the others.

        Args:
            version: weights that this generator has and keeps until no evaluation is under way; -1 for none.
        """
        self._appear()
        names = (TRAINING, "state", "pin:", HOLDERS)
        name, *replies, unknown = self._broker.call(
            "lease", names, [CONSUMER_GROUP, self.consumer, version, n, training]
        )
        evaluation = name.decode()
        self._notice(unknown)
        deliveries: list[Delivery] = []
        for stream, entries in zip((_stream(evaluation), TRAINING), replies, strict=True):
            deliveries += self._read(stream, [(entry_id, pairs(fields)) for entry_id, fields in entries])
        return Lease(evaluation, deliveries)

    def previous(self, prompt_ids: Sequence[str]) -> list[Payload | None]:
        """Each prompt's previous response, to measure drift on; None at its first visit."""
        return self._broker.payloads("previous", prompt_ids)

    def take(self, n: int, block_ms: int = 1000) -> list[Delivery]:
        """Up to `n` new tasks that belong to no evaluation, waiting up to `block_ms` for the first."""
        self._appear()
        entries = self._broker.read_group(TRAINING, CONSUMER_GROUP, self.consumer, count=n, block_ms=block_ms)
        return self._read(TRAINING, entries)

    def adopt(self, n: int, evaluation: str = "") -> list[Delivery]:
        """Take over up to `n` tasks, of an evaluation or of training, that no living process works on.

        They belong to processes whose heartbeat has stopped, or were delivered to this one in a reply that was lost.
        A process that was itself cut off from Redis takes nothing: the others may have been, too.
        """
        self._appear()
        asked, stream = time.monotonic(), _stream(evaluation)
        if asked < self._judges_from:
            return []
        names = (stream, TRAINING, "state", HOLDERS, TAKEOVERS)
        arguments: list[str | int] = [CONSUMER_GROUP, self.consumer, self._silence_ms, n, LEASES_A_CALL]
        arguments += [int(1000 * seconds) for seconds in self._clock.expected()]
        arguments += [entry_id.id for entry_id in self._held | self._delivered if entry_id.stream == stream]
        shown, taken, unknown = self._broker.call("adopt", names, arguments)
        self._clock.learn(int(shown) / 1000, asked)
        self._notice(unknown)
        entries = [(entry_id, pairs(fields)) for entry_id, fields, _ in taken]
        return self._read(stream, entries, {entry_id: deliveries for entry_id, _, deliveries in taken})

    def beat(self, entry_ids: Iterable[EntryId]) -> Pulse:
        """Tell Redis that this process is alive and holds these tasks."""
        held = set(entry_ids)
        delivered, self._delivered = self._delivered, set()
        self._held = held | delivered
        evaluations = sorted({entry_id.stream for entry_id in held} - {TRAINING})
        takeovers, finished, evaluation, *exist = self._say_alive(*evaluations)
        over = {name for name, exists in zip(evaluations, exist, strict=True) if not exists}
        lost = {entry_id for entry_id in held if entry_id.stream in over}
        if takeovers != self._takeovers or self._look_again:
            lost |= self._lost(held - lost)
            # Tasks that were delivered after the caller listed the held ones are checked next time.
            self._look_again = takeovers != self._takeovers and bool(delivered)
            self._takeovers = takeovers
        return Pulse(lost, bool(finished), evaluation.decode())

    def finish(self, results: Sequence[Finished]) -> int:
        """Store results; returns how many were the first for their task. The others change nothing."""
        return sum(
            self._finish(stream, finished)
            for stream, finished in _by_stream((result.entry_id, result) for result in results)
        )

    def requeue(self, deliveries: Sequence[Delivery]) -> int:
        """Put tasks back, each to be run as the attempt it names; returns how many this process still held."""
        moved = 0
        for stream, returned in _by_stream((delivery.entry_id, delivery) for delivery in deliveries):
            arguments: list[Any] = [CONSUMER_GROUP, self.consumer]
            for delivery in returned:
                arguments += (delivery.entry_id.id, delivery.attempt)
            moved += int(self._broker.call("requeue", [stream], arguments))
        return moved

    def leave(self) -> None:
        """Forget this consumer; to be called when it has no task left."""
        self._broker.call("leave", (TRAINING, "state", HOLDERS, TAKEOVERS), [CONSUMER_GROUP, self.consumer])

    def set_aside(
        self, delivery: Delivery, failure: Failure, reason: str, *, retire: bool = False, **fields: Any
    ) -> Finished:
        """The result of a task that cannot be answered: it has no reward, and the task is kept as a dead letter.

        `retire`: the prompt can never be answered. `fields`: header fields that describe the episode up to the failure.
        """
        task, reason = delivery.task, readable(reason)
        fields |= {"prompt_id": task.prompt_id, "kind": task.kind, "retire": retire, "generator": self.name}
        header = SampleHeader.skipped(task.task_id, failure, reason, **fields)
        # With this letter the task can be replayed.
        entry = {b"id": task.task_id.encode(), b"task": task.pack(), b"attempt": b"1"}
        letter = dead.letter(TRAINING, reason, entry, self.consumer)
        return Finished(delivery.entry_id, header, dead_letter=letter)

    def _appear(self) -> None:
        """Register this process before Redis leases it a task; heartbeats keep it registered."""
        if time.monotonic() - self._beaten > self._broker.dead_after / 4:
            self._say_alive()

    def _say_alive(self, *evaluations: str) -> list[Any]:
        """Renew everything that this process has leased; returns the reply of beat.lua."""
        names = (HOLDERS, TAKEOVERS, "finished", "state", *evaluations)
        reply: list[Any] = self._broker.call("beat", names, [self.consumer])
        before, self._beaten = self._beaten, time.monotonic()
        if before > -math.inf and self._broker.was_cut_off(self._beaten - before):
            self._judges_from = self._beaten + self._broker.dead_after
        self._notice(reply[0] < 0)
        reply[0] = max(reply[0], 0)
        return reply

    def _notice(self, unknown: int) -> None:
        """If Redis did not know this process, have the next heartbeat check every held task."""
        if unknown:
            self._takeovers = -1

    def _lost(self, entry_ids: set[EntryId]) -> set[EntryId]:
        """Those of these tasks that are not leased to this process any more."""
        lost: set[EntryId] = set()
        for stream in {entry_id.stream for entry_id in entry_ids}:
            arguments = [CONSUMER_GROUP, self.consumer]
            arguments += [entry_id.id for entry_id in entry_ids if entry_id.stream == stream]
            lost |= {EntryId(stream, entry.decode()) for entry in self._broker.call("held", [stream], arguments)}
        return lost

    def _finish(self, stream: str, results: Sequence[Finished]) -> int:
        accepted, size = 0, 0
        arguments: list[Any] = []
        for result in results:
            header = result.header
            payload = encode_payload(result.payload) if result.payload is not None else b""
            kept_for = header.prompt_id if result.for_drift else b""
            packed = header.pack()
            arguments += (result.entry_id.id, packed, payload, kept_for, result.dead_letter)
            size += len(packed) + len(payload)
            if size > CALL_BYTES:
                accepted += self._call_finish(stream, arguments)
                arguments, size = [], 0
        return accepted + self._call_finish(stream, arguments)

    def _call_finish(self, stream: str, arguments: list[Any]) -> int:
        if not arguments:
            return 0
        names = (stream, "samples", "counters", "dead", "payload:", "previous:")
        return int(self._broker.call("finish", names, [CONSUMER_GROUP, *arguments]))

    def _read(
        self,
        stream: str,
        entries: Sequence[tuple[bytes, dict[bytes, bytes]]],
        redelivered: Mapping[bytes, int] = MappingProxyType({}),
    ) -> list[Delivery]:
        deliveries: list[Delivery] = []
        for raw_id, fields in entries:
            entry_id = EntryId(stream, raw_id.decode())
            try:
                attempt = int(fields.get(b"attempt", b"1")) + redelivered.get(raw_id, 0)
                task = Task.unpack(fields.get(b"task", b""))
                deliveries.append(Delivery(entry_id, task, attempt))
            except (InvalidMessage, ValueError) as error:
                self._bury(entry_id, fields, str(error))
        self._delivered |= {delivery.entry_id for delivery in deliveries}
        return deliveries

    def _bury(self, entry_id: EntryId, fields: dict[bytes, bytes], reason: str) -> None:
        """Move an unreadable task to the dead letters, and send a header: the sampler need not wait for it."""
        note = dead.letter(TRAINING, reason, fields, self.consumer)
        task_id = fields.get(b"id", b"").decode(errors="replace")
        if not task_id:
            dead.bury(self._broker, entry_id.stream, CONSUMER_GROUP, entry_id.id, note)
            return
        header = SampleHeader.skipped(task_id, Failure.INVALID_MESSAGE, reason, generator=self.name)
        self.finish([Finished(entry_id, header, dead_letter=note)])


def readable(reason: str) -> str:
    """A reason, shortened for headers and dead letters: it may quote text of any length from a model or a program."""
    return reason.encode(errors="backslashreplace").decode()[:MAX_REASON]


def pairs(fields: list[bytes]) -> dict[bytes, bytes]:
    """A stream entry's fields, which a script returns as name, value, name, value, ..."""
    return dict(zip(fields[::2], fields[1::2], strict=True))


def _stream(evaluation: str) -> str:
    """The stream that holds the tasks of an evaluation; without one, of training."""
    return f"{TRAINING}:{evaluation}" if evaluation else TRAINING


def _by_stream(items: Iterable[tuple[EntryId, T]]) -> Iterable[tuple[str, list[T]]]:
    streams: defaultdict[str, list[T]] = defaultdict(list)
    for entry_id, item in items:
        streams[entry_id.stream].append(item)
    return streams.items()
