"""The sampler's side: it reads headers, and commits all decisions of a round atomically."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import msgpack
from redis.exceptions import ResponseError

from common.messages import Batch, InvalidMessage, SampleHeader, Task
from common.streams import dead
from common.streams.batches import CONSUMER_GROUP as LEARNERS_GROUP
from common.streams.broker import Broker
from common.streams.lease import LeaseLost, LedgerState, RedisBehind, SamplerLease
from common.streams.tasks import CONSUMER_GROUP as GENERATORS_GROUP
from common.unpack import unpack

CONSUMER_GROUP = "sampler"
CONSUMER = "sampler"
PAGE = 500  # entries of the journal that are read at a time
LEASE_LOST, BEHIND, REPEATED = -1, -2, -3  # what commit.lua returns instead of a count
KEYS = (
    "lease", "state", "samples", "tasks", "batches", "tracker", "open", "outstanding", "counters", "evaluations",
    "payload:", "pin:", "journal",
)  # fmt: skip


class Pin(NamedTuple):
    """The weight version that answers an evaluation, and the seconds since a generator with it was last seen."""

    version: int
    unseen: float


@dataclass
class Commit:
    """What one round of the sampler changes."""

    counted: list[str] = field(default_factory=list)  # entry ids of the headers that are counted with this commit
    tracker: dict[str, bytes] = field(default_factory=dict)  # new rows by prompt id
    open_add: dict[str, bytes] = field(default_factory=dict)  # to the open batch, by sample id
    open_remove: list[str] = field(default_factory=list)  # from the open batch
    outstanding_remove: list[str] = field(default_factory=list)  # task ids whose header is counted
    # Names of evaluations that are over; their unanswered tasks are withdrawn.
    closed: list[str] = field(default_factory=list)
    # New tasks, each with the record that the sampler needs when the task's header arrives.
    dispatch: list[tuple[Task, bytes]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)  # manifests to send to the learner
    unlink: list[str] = field(default_factory=list)  # samples whose payload is no longer needed
    counters: dict[str, int] = field(default_factory=dict)  # increments by name
    scalars: dict[str, bytes | str | int | float] = field(default_factory=dict)  # single values to keep
    evaluations: dict[int, bytes] = field(default_factory=dict)  # held-out results by version, packed
    rewards: list[tuple[str, float, float, str]] = field(default_factory=list)  # see `JournalEntry`, for the journal
    restored: dict[str, Any] = field(default_factory=dict)  # see `JournalEntry`, for the journal

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def arguments(self) -> list[Any]:
        """All lists of commit.lua but the last, each preceded by its length."""
        lists: list[list[Any]] = [
            self.counted,
            _flat(self.tracker),
            _flat(self.open_add),
            self.open_remove,
            self.outstanding_remove,
            [item for task, dispatched in self.dispatch for item in (task.task_id, dispatched)],
            self.closed,
            [item for task, _ in self.dispatch for item in (task.evaluation, task.task_id, task.pack())],
            [batch.pack() for batch in self.batches],
            self.unlink,
            _flat(self.counters),
            _flat(self.scalars),
            _flat(self.evaluations),
        ]
        return [item for values in lists for item in (len(values), *values)]


class SamplerLedger:
    """The streams and state of one run, held by one sampler at a time.

    Args:
        journal: keep every commit on the stream `journal`, for audits. It is written with the commit itself, so that it
            agrees with this Redis even after a crash or a fail-over.
    """

    def __init__(self, broker: Broker, owner: str | None = None, *, journal: bool = False) -> None:
        self.broker = broker
        self._journal = journal
        self._lease = SamplerLease(broker, owner)
        self._sequence = 0
        self._seen = ("", b"", 0.0)  # evaluation, how often generators with its version have asked, since when
        self._pin_looked = -math.inf
        broker.ensure_group("samples", CONSUMER_GROUP)

    def acquire(self, wait: float | None = None) -> LedgerState:
        """Become the run's sampler and read the run's state; waits and raises as `SamplerLease.take` does."""
        self.broker.ensure_group("samples", CONSUMER_GROUP)  # Redis may have lost it
        self._lease.take(wait)
        state, self._sequence = self._lease.read()
        return state

    def read(self, count: int = 256, block_ms: int = 1000) -> list[tuple[str, SampleHeader]]:
        """New headers with their entry ids; everything read before must have been committed. Raises what `renew` does.

        Headers that were delivered and never committed, to a sampler that died or in a reply that was lost, come first.
        """
        read = partial(self.broker.read_group, "samples", CONSUMER_GROUP, CONSUMER, count=count)
        try:
            entries = read(after="0") or read(block_ms=block_ms)
        except ResponseError:
            self.renew()  # raises the actual reason if Redis has lost the run
            raise
        return [header for header in map(self._header, entries) if header is not None]

    def arrived(self) -> int:
        """Number of headers that no commit has counted."""
        return int(self.broker.redis.xlen(self.broker.key("samples")))

    def commit(self, commit: Commit) -> int:
        """Write a round; returns how many headers it acknowledged.

        Raises:
            LeaseLost: another sampler has replaced this one; nothing was written.
            RedisBehind: Redis lacks earlier commits, or headers that were read; nothing was written.
        """
        sequence = self._sequence + 1
        record = [JournalEntry.of(sequence, commit).pack()] if self._journal else []
        arguments: list[Any] = [self._lease.owner, self._lease.length_ms, sequence, CONSUMER_GROUP, GENERATORS_GROUP]
        arguments += [*commit.arguments(), len(record), *record]
        acknowledged = int(self.broker.call("commit", KEYS, arguments))
        if acknowledged == LEASE_LOST:
            raise LeaseLost(f"run {self.broker.run!r} has another sampler now")
        if acknowledged == BEHIND:
            raise RedisBehind(f"commit {sequence} does not follow what Redis holds")
        self._sequence = sequence
        return len(commit.counted) if acknowledged == REPEATED else acknowledged

    def renew(self) -> None:
        """Check that this sampler still holds the lease, before it does something that no commit protects.

        Raises:
            LeaseLost: another sampler has replaced this one.
            RedisBehind: Redis lacks commits of this sampler.
        """
        sequence = self._lease.renew()
        if sequence > self._sequence:
            raise LeaseLost(f"run {self.broker.run!r} had another sampler meanwhile")
        if sequence < self._sequence:
            raise RedisBehind(f"Redis holds commit {sequence}, not {self._sequence}")

    def task_ids(self, stream: str, after: str, count: int) -> tuple[str, list[str]]:
        """Ids of the tasks in up to `count` entries of `tasks`, `tasks:EVALUATION` or `samples`.

        Args:
            after: the last entry that was read; "" at the first call.

        Returns:
            The last entry that was read, "" at the end of the stream; and the ids.
        """
        start = f"({after}" if after else "-"
        last, ids = self.broker.call("ids", [stream], [start, count])
        return last.decode(), [task_id.decode(errors="replace") for task_id in ids]

    def pin(self, evaluation: str) -> Pin | None:
        """The version that answers an evaluation; None while no generator has asked for its tasks."""
        version, seen = self.broker.redis.hmget(self.broker.key(f"pin:{evaluation}"), "version", "seen")
        if version is None:
            return None
        # Seconds of this process's clock. An outage of Redis does not count as silence: nobody could ask then.
        now, looked = time.monotonic(), self._pin_looked
        self._pin_looked = now
        if self._seen[:2] != (evaluation, seen) or self.broker.was_cut_off(now - looked):
            self._seen = (evaluation, seen, now)
        return Pin(int(version), now - self._seen[2])

    def add_dead_letter(self, header: SampleHeader, reason: str) -> None:
        fields = {b"id": header.task_id.encode(), b"header": header.pack()}
        dead.add(self.broker, dead.letter("samples", reason, fields, CONSUMER))

    def reset(self) -> None:
        """Delete the run's state from Redis: the learner must start again, from its newest checkpoint.

        Raises:
            LeaseLost: another sampler has replaced this one; nothing was changed.
        """
        broker, groups = self.broker, {"tasks": GENERATORS_GROUP, "samples": CONSUMER_GROUP, "batches": LEARNERS_GROUP}
        names = ["lease", "learner", *groups, "state", "steps", "tracker", "open", "outstanding", "counters"]
        names += ["evaluations", "journal"]
        # Without holders, every generator checks each of its tasks, and finds them gone.
        for prefix in ("tasks:", "pin:", "holders:", "takeovers:"):
            names += [key.removeprefix(broker.key("")) for key in broker.keys_of(prefix)]
        if broker.call("reset", names, [self._lease.owner, self._lease.length_ms, *groups.values()]) < 0:
            raise LeaseLost(f"run {broker.run!r} has another sampler now")
        self.clear_payloads()

    def clear_payloads(self) -> None:
        """Free the tokens of all samples: none of them will be trained on."""
        for payload in self.broker.keys_of("payload:"):
            self.broker.redis.unlink(payload)

    def release(self) -> None:
        """Give the lease back, so that a successor need not wait."""
        self._lease.release()

    def _header(self, entry: tuple[bytes, dict[bytes, bytes]]) -> tuple[str, SampleHeader] | None:
        entry_id, fields = entry[0].decode(), entry[1]
        task_id = fields.get(b"id", b"").decode(errors="replace")
        try:
            header = SampleHeader.unpack(fields.get(b"header", b""))
            if header.task_id != task_id:
                raise InvalidMessage(
                    f"SampleHeader: it names task {header.task_id}, and came as the result of {task_id}"
                )
            return entry_id, header
        except InvalidMessage as error:
            note = dead.letter("samples", str(error), fields, CONSUMER)
            if not task_id:
                dead.bury(self.broker, "samples", CONSUMER_GROUP, entry_id, note)
                return None
            dead.add(self.broker, note)
            # Its task is still waited for: count it as skipped.
            return entry_id, SampleHeader.skipped(task_id, error.failure, str(error))


def _flat(pairs: dict[Any, Any]) -> list[Any]:
    return [item for pair in pairs.items() for item in pair]


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One commit."""

    sequence: int  # its number, 1 more than that of the previous commit
    # Prompt id, reward, forgetting factor and task id of each value that was updated, in order.
    rewards: Sequence[tuple[str, float, float, str]]
    dispatched: Sequence[str]  # task ids
    counted: Sequence[str]  # task ids
    batches: Sequence[tuple[int, Sequence[str]]]  # number and sample ids of each
    discarded: Sequence[str]  # tasks whose tokens, if any, will be in no batch
    # What this commit took from the run folder, after Redis was lost: `version` at which it continues, `rows` of the
    # tracker by prompt id, packed; state of its `population`.
    restored: Mapping[str, Any] = field(default_factory=dict)
    version: int = -1  # of the weights, as the sampler knew it; -1 before the first
    counters: Mapping[str, int] = field(default_factory=dict)  # increments by name

    @classmethod
    def of(cls, sequence: int, commit: Commit) -> JournalEntry:
        return cls(
            sequence,
            commit.rewards,
            [task.task_id for task, _ in commit.dispatch],
            commit.outstanding_remove,
            [(batch.batch_id, batch.sample_ids) for batch in commit.batches],
            commit.unlink,
            commit.restored,
            int(commit.scalars.get("version", -1)),
            commit.counters,
        )

    def pack(self) -> bytes:
        return bytes(msgpack.packb([getattr(self, item.name) for item in fields(self)]))


def read_journal(broker: Broker) -> Iterator[JournalEntry]:
    """Every commit, oldest first."""
    after = "-"
    while page := broker.redis.xrange(broker.key("journal"), min=after, count=PAGE):
        for entry_id, values in page:
            yield JournalEntry(*unpack(values[b"commit"]))
            after = f"({entry_id.decode()}"
