"""Leases of the entries of a stream, each of which is finished once: what generators and teachers have in common."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from common.messages import Failure, InvalidMessage, SampleHeader, Task
from common.payload import Payload, encode_payload
from common.streams import dead
from common.streams.broker import Broker

# Redis does nothing else while a script runs, so many large payloads go in several calls.
CALL_BYTES = 1 << 20
MAX_REASON = 2000  # characters
LEASES_A_CALL = 1000  # looked at by one call of a script

T = TypeVar("T")
Work = TypeVar("Work", Task, SampleHeader)


@dataclass(frozen=True, slots=True)
class Stage(Generic[Work]):
    """A stage that every training task passes: its stream, and the processes that finish the stream's entries.

    Attributes:
        stream: name of its stream; evaluations have streams beside it, `STREAM:EVALUATION`.
        group: the consumer group of its processes, which is also what messages call them.
        field: of an entry, beside `id` and `attempt`: what is to be done, packed.
        message: type of that field.
    """

    stream: str
    group: str
    field: str
    message: type[Work]

    @property
    def holders(self) -> str:
        """Name of the key with the last heartbeat of each process that may have leases."""
        return f"holders:{self.stream}"

    @property
    def takeovers(self) -> str:
        """Name of the key that says how often each process has lost leases to others."""
        return f"takeovers:{self.stream}"


class EntryId(NamedTuple):
    """Where a leased task is: the name of its stream, and its id there."""

    stream: str
    id: str


@dataclass(frozen=True, slots=True)
class Delivery(Generic[Work]):
    """What is leased to this process; `attempt` counts from 1 and grows with every failure or takeover.

    `task` is what a generator answers, or the header of what a teacher scores.
    """

    entry_id: EntryId
    task: Work
    attempt: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a leased entry.

    With `keep` the response is also stored as its prompt's previous one, to measure drift on. `teacher` names the one
    that scores the payload before the sampler hears of it (`common.streams.scoring`); "" none.
    """

    entry_id: EntryId
    header: SampleHeader
    payload: Payload | None = None
    keep: bool = False
    dead_letter: bytes = b""
    teacher: str = ""


class Pulse(NamedTuple):
    """The reply to a heartbeat.

    Attributes:
        lost: held tasks that another process has taken over, or that are not needed any more.
        finished: whether the run is over.
        evaluation: name of the one that is under way, or "".
    """

    lost: set[EntryId]
    finished: bool
    evaluation: str


class ServerClock:
    """Predicts Redis' clock from this process's monotonic clock."""

    def __init__(self, redis: Any, tolerance: float) -> None:
        """`tolerance`: seconds that a command may need until Redis reads its clock."""
        self._tolerance = tolerance
        asked = time.monotonic()
        seconds, micros = redis.time()
        self._ahead = seconds + micros / 1e6 - asked  # seconds, of this process's clock

    def expected(self) -> tuple[float, float]:
        """The earliest and latest time in seconds that Redis' clock shows a command sent now, unless it was set."""
        now = time.monotonic() + self._ahead
        return now - self._tolerance, now + self._tolerance

    def learn(self, seconds: float, asked: float) -> None:
        """Redis' clock showed `seconds` to a command that was sent at `asked` of this process's clock."""
        # Redis read its clock after the command was sent and before now. Slow commands tell less than fast ones.
        least, most = seconds - time.monotonic(), seconds - asked
        self._ahead = min(max(self._ahead, least), most)


class Inbox(Generic[Work]):
    """One process's share of a stage's stream, and of the streams that evaluations have to themselves."""

    stage: Stage[Work]

    def __init__(self, broker: Broker, name: str, stage: Stage[Work]) -> None:
        self._broker = broker
        # Differs at each start: the heartbeat of a restarted process must not renew what this one held.
        self.consumer = f"{name}:{os.urandom(4).hex()}"
        self.name, self.stage = name, stage
        self._silence_ms = int(1000 * broker.dead_after)
        self._clock = ServerClock(broker.redis, broker.dead_after / 2)
        self._takeovers = 0  # of tasks of this process
        self._look_again = False  # at every task, with the next heartbeat
        self._beaten = -math.inf  # time of its last heartbeat
        self._judges_from = -math.inf  # a process that lost its connection cannot tell which others did
        self._held: set[EntryId] = set()  # as the last heartbeat said
        self._delivered: set[EntryId] = set()  # since then
        broker.ensure_group(stage.stream, stage.group)

    def take(self, n: int, block_ms: int = 1000) -> list[Delivery[Work]]:
        """Up to `n` new tasks that belong to no evaluation, waiting up to `block_ms` for the first."""
        self._appear()
        stage = self.stage
        entries = self._broker.read_group(stage.stream, stage.group, self.consumer, count=n, block_ms=block_ms)
        return self._read(stage.stream, entries)

    def adopt(self, n: int, evaluation: str = "") -> list[Delivery[Work]]:
        """Take over up to `n` tasks, of an evaluation or of training, that no living process works on.

        They belong to processes whose heartbeat has stopped, or were delivered to this one in a reply that never came.
        A process that was itself cut off from Redis takes nothing: the others may have been, too.
        """
        self._appear()
        stage, asked = self.stage, time.monotonic()
        stream = self._stream(evaluation)
        if asked < self._judges_from:
            return []
        names = (stream, stage.stream, "state", stage.holders, stage.takeovers)
        arguments: list[str | int] = [stage.group, self.consumer, self._silence_ms, n, LEASES_A_CALL]
        arguments += [int(1000 * seconds) for seconds in self._clock.expected()]
        arguments += [entry_id.id for entry_id in self._held | self._delivered if entry_id.stream == stream]
        shown, taken, unknown = self._call("adopt", names, arguments)
        self._clock.learn(int(shown) / 1000, asked)
        self._notice(unknown)
        entries = [(entry_id, pairs(fields)) for entry_id, fields, _ in taken]
        return self._read(stream, entries, {entry_id: deliveries for entry_id, _, deliveries in taken})

    def beat(self, entry_ids: Iterable[EntryId]) -> Pulse:
        """Tell Redis that this process is alive and holds these tasks."""
        held = set(entry_ids)
        delivered, self._delivered = self._delivered, set()
        self._held = held | delivered
        evaluations = sorted({entry_id.stream for entry_id in held} - {self.stage.stream})
        takeovers, finished, evaluation, *exist = self._say_alive(*evaluations)
        over = {name for name, exists in zip(evaluations, exist, strict=True) if not exists}
        lost = {entry_id for entry_id in held if entry_id.stream in over}
        if takeovers != self._takeovers or self._look_again:
            lost |= self._lost(held - lost)
            # Tasks that were delivered after the caller listed the held ones are looked at next time.
            self._look_again = takeovers != self._takeovers and bool(delivered)
            self._takeovers = takeovers
        return Pulse(lost, bool(finished), evaluation.decode())

    def finish(self, results: Sequence[Finished]) -> int:
        """Store results; returns how many were the first for their task. The others change nothing."""
        return sum(
            self._finish(stream, finished)
            for stream, finished in _by_stream((result.entry_id, result) for result in results)
        )

    def requeue(self, deliveries: Sequence[Delivery[Work]]) -> int:
        """Put tasks back, each to be run as the attempt it names; returns how many this process still held."""
        moved = 0
        for stream, returned in _by_stream((delivery.entry_id, delivery) for delivery in deliveries):
            arguments: list[Any] = [self.stage.group, self.consumer]
            for delivery in returned:
                arguments += (delivery.entry_id.id, delivery.attempt)
            moved += int(self._call("requeue", [stream], arguments))
        return moved

    def leave(self) -> None:
        """Forget this consumer; to be called when it has no task left."""
        stage = self.stage
        self._call("leave", (stage.stream, "state", stage.holders, stage.takeovers), [stage.group, self.consumer])

    def _call(self, script: str, names: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run a script on these keys of the run."""
        return self._broker.script(script)([self._broker.key(name) for name in names], arguments)

    def _stream(self, evaluation: str) -> str:
        """The stream that holds the tasks of an evaluation, or all others."""
        return f"{self.stage.stream}:{evaluation}" if evaluation else self.stage.stream

    def _appear(self) -> None:
        """Make sure that Redis knows this process before it leases it a task; heartbeats do the rest."""
        if time.monotonic() - self._beaten > self._broker.dead_after / 4:
            self._say_alive()

    def _say_alive(self, *evaluations: str) -> list[Any]:
        """Renew everything that this process has leased; the reply of beat.lua."""
        names = (self.stage.holders, self.stage.takeovers, "finished", "state", *evaluations)
        reply: list[Any] = self._call("beat", names, [self.consumer])
        before, self._beaten = self._beaten, time.monotonic()
        if before > -math.inf and self._broker.was_cut_off(self._beaten - before):
            self._judges_from = self._beaten + self._broker.dead_after
        self._notice(reply[0] < 0)
        reply[0] = max(reply[0], 0)
        return reply

    def _notice(self, unknown: int) -> None:
        """If Redis did not know of this process, have the next heartbeat look at every task."""
        if unknown:
            self._takeovers = -1

    def _lost(self, entry_ids: set[EntryId]) -> set[EntryId]:
        """Those of these tasks that are not leased to this process any more."""
        lost: set[EntryId] = set()
        for stream in {entry_id.stream for entry_id in entry_ids}:
            arguments = [self.stage.group, self.consumer]
            arguments += [entry_id.id for entry_id in entry_ids if entry_id.stream == stream]
            lost |= {EntryId(stream, entry.decode()) for entry in self._call("held", [stream], arguments)}
        return lost

    def _finish(self, stream: str, results: Sequence[Finished]) -> int:
        accepted, size = 0, 0
        arguments: list[Any] = []
        for result in results:
            header = result.header
            payload = encode_payload(result.payload) if result.payload is not None else b""
            kept_for = header.prompt_id if result.keep else b""
            packed = header.pack()
            arguments += (result.entry_id.id, packed, payload, kept_for, result.dead_letter, result.teacher)
            size += len(packed) + len(payload)
            if size > CALL_BYTES:
                accepted += self._call_finish(stream, arguments)
                arguments, size = [], 0
        return accepted + self._call_finish(stream, arguments)

    def _call_finish(self, stream: str, arguments: list[Any]) -> int:
        if not arguments:
            return 0
        names = (stream, "samples", "counters", "dead", "payload:", "previous:", "scoring:")
        return int(self._call("finish", names, [self.stage.group, *arguments]))

    def _letter(self, delivery: Delivery[Work], reason: str) -> bytes:
        """A dead letter with which a task could be replayed."""
        task = delivery.task
        entry = {b"id": task.task_id.encode(), self.stage.field.encode(): task.pack(), b"attempt": b"1"}
        return dead.letter(self.stage.stream, reason, entry, self.consumer)

    def _read(
        self,
        stream: str,
        entries: Sequence[tuple[bytes, dict[bytes, bytes]]],
        redelivered: Mapping[bytes, int] = MappingProxyType({}),
    ) -> list[Delivery[Work]]:
        deliveries: list[Delivery[Work]] = []
        for raw_id, fields in entries:
            entry_id = EntryId(stream, raw_id.decode())
            try:
                attempt = int(fields.get(b"attempt", b"1")) + redelivered.get(raw_id, 0)
                task = self.stage.message.unpack(fields.get(self.stage.field.encode(), b""))
                deliveries.append(Delivery(entry_id, task, attempt))
            except (InvalidMessage, ValueError) as error:
                self._bury(entry_id, fields, str(error))
        self._delivered |= {delivery.entry_id for delivery in deliveries}
        return deliveries

    def _bury(self, entry_id: EntryId, fields: dict[bytes, bytes], reason: str) -> None:
        """Move an unreadable task to the dead letters, and send a header: the sampler need not wait for it."""
        note = dead.letter(self.stage.stream, reason, fields, self.consumer)
        task_id = fields.get(b"id", b"").decode(errors="replace")
        if not task_id:
            dead.bury(self._broker, entry_id.stream, self.stage.group, entry_id.id, note)
            return
        header = SampleHeader.skipped(task_id, Failure.INVALID_MESSAGE, reason, generator=self.name)
        self.finish([Finished(entry_id, header, dead_letter=note)])


def readable(reason: str) -> str:
    """A reason as headers and letters have it: it may quote what a model or a program wrote, of any length."""
    return reason.encode(errors="backslashreplace").decode()[:MAX_REASON]


def pairs(fields: list[bytes]) -> dict[bytes, bytes]:
    """A stream entry's fields, which a script returns as name, value, name, value, ..."""
    return dict(zip(fields[::2], fields[1::2], strict=True))


def _by_stream(items: Iterable[tuple[EntryId, T]]) -> Iterable[tuple[str, list[T]]]:
    """Items by the stream that their entry is in."""
    streams: defaultdict[str, list[T]] = defaultdict(list)
    for entry_id, item in items:
        streams[entry_id.stream].append(item)
    return streams.items()
