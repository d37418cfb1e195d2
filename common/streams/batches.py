"""The learner's side: it reads batches in order and their payloads, and announces versions to the other processes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgpack
from redis.exceptions import ResponseError

from common.errors import UserError
from common.messages import Batch, InvalidMessage, Step
from common.payload import Payload
from common.streams import dead
from common.streams.broker import Broker
from common.streams.lease import RedisBehind, Replaced, is_dead_neighbour, owner_name
from common.streams.steps import STEPS_KEPT

CONSUMER_GROUP = "learner"
# A run has one learner, so its name is fixed, and after a restart it finds its own unreleased batches.
CONSUMER = "learner"
BEHIND = -2  # what learner.lua returns in place of a count


class RunLost(UserError):
    """Redis has lost all data of the run."""


class BatchInbox:
    """The learner's view of the stream `batches`, and the only place where the learner changes the run in Redis.

    A run has one learner: the last one that called `acquire`. Redis refuses later writes from any other.
    """

    def __init__(self, broker: Broker, owner: str | None = None) -> None:
        self.owner = owner or owner_name()
        self._broker = broker
        self._epoch = 0
        self._last = "0"
        # Entries that Redis must have: the newest batch that was read, until it is released, and the newest step.
        self._newest_batch = self._newest_step = b""
        broker.ensure_group("batches", CONSUMER_GROUP)

    def is_new(self) -> bool:
        """Whether Redis has had no learner of this run so far."""
        return not self._broker.redis.exists(self._broker.key("learner"))

    def acquire(self, wait: float | None = None) -> Self:
        """Become the run's learner.

        Waits until the heartbeat of a learner that died expires (at most `wait` seconds, by default a little longer
        than it lasts); a dead one on the same host is replaced at once.

        Raises:
            Replaced: another learner is alive.
        """
        broker, key = self._broker, self._broker.key("learner")
        deadline = time.monotonic() + (broker.dead_after + 1 if wait is None else wait)
        while any(process["role"] == "learner" for process in broker.processes().values()):
            holder = (broker.redis.hget(key, "owner") or b"").decode()
            if not holder or is_dead_neighbour(holder):
                break
            if time.monotonic() > deadline:
                raise Replaced(f"run {broker.run!r} already has a learner ({holder}); stop that one first")
            time.sleep(0.1)
        self._epoch = int(broker.call("become_learner", ["learner"], [self.owner]))
        return self

    def check(self) -> None:
        """Raise `Replaced`, `RunLost` or `RedisBehind` if Redis would refuse this learner's writes."""
        self._write()

    def next(self, block_ms: int = 1000) -> Batch | None:
        """The next batch, or None if none came in time.

        Batches that were delivered but not released come first, in order: after a crash they are trained on
        again from the checkpoint, and a reply that was lost on the way is read once more.
        """
        try:
            # A new batch is read back from the delivered ones: if the first reply was lost and the client repeated the
            # call, Redis delivered a later batch, and the lost one must come first.
            if entry := self._delivered() or (self._deliver(block_ms) and self._delivered()):
                return self._batch(*entry)
        except ResponseError:
            self.check()  # raises the actual reason if Redis was emptied meanwhile
            raise
        return None

    def payloads(self, sample_ids: Sequence[str]) -> list[Payload | None]:
        """The samples' tokens; None if a payload is missing or invalid."""
        return self._broker.payloads("payload", sample_ids)

    def announce(self, step: Step) -> None:
        """Tell all processes that a version is published."""
        self._write(step=step.pack())

    def set_address(self, endpoint: Mapping[str, str]) -> None:
        """Tell all processes where the weights are served."""
        self._write(endpoint=msgpack.packb(dict(endpoint)))

    def release_before(self, version: int) -> int:
        """Free all batches of versions before this one, with their payloads; returns how many there were."""
        entries, sample_ids = [], []
        for entry_id, fields in self._broker.redis.xrange(self._broker.key("batches")):
            try:
                batch = Batch.unpack(fields.get(b"batch", b""))
            except InvalidMessage:
                continue  # `next` moves it to the dead letters
            if batch.batch_id < version:
                entries.append(entry_id)
                sample_ids += batch.sample_ids
        return self._write(entries=entries, sample_ids=sample_ids) if entries else 0

    def _write(
        self, *, step: bytes = b"", endpoint: bytes = b"", entries: Sequence[bytes] = (), sample_ids: Sequence[str] = ()
    ) -> int:
        broker = self._broker
        # Not required any more: a call that is repeated because its reply was lost finds this batch released.
        if self._newest_batch in entries:
            self._newest_batch = b""
        keys = ("learner", "steps", "endpoints", "batches", "counters", "payload:")
        arguments: list[Any] = [self.owner, self._epoch, step, STEPS_KEPT, endpoint, CONSUMER_GROUP]
        arguments += [self._newest_batch, self._newest_step, len(entries)]
        released, detail = broker.call("learner", keys, [*arguments, *entries, *sample_ids])
        if released >= 0:
            if detail:
                self._newest_step = detail
            return int(released)
        if released == BEHIND:
            raise RedisBehind(
                f"Redis came back with an older state of run {broker.run!r}; when it is started again, this "
                "learner continues from its newest checkpoint"
            )
        if detail:
            raise Replaced(
                f"run {broker.run!r} has another learner now ({detail.decode()}); this one has changed nothing"
            )
        raise RunLost(
            f"Redis has lost run {broker.run!r}: nothing of it is there any more; start it again with "
            "--resume to continue from the newest checkpoint"
        )

    def _delivered(self) -> tuple[str, dict[bytes, bytes]] | None:
        """The oldest entry that was delivered, and that `next` has not returned yet."""
        entries = self._broker.read_group("batches", CONSUMER_GROUP, CONSUMER, after=self._last, count=1)
        return (entries[0][0].decode(), entries[0][1]) if entries else None

    def _deliver(self, block_ms: int) -> bool:
        """Have Redis deliver a new entry; False if none came in time."""
        return bool(self._broker.read_group("batches", CONSUMER_GROUP, CONSUMER, count=1, block_ms=block_ms))

    def _batch(self, entry_id: str, fields: dict[bytes, bytes]) -> Batch | None:
        """The batch of an entry; None, and a dead letter, if it cannot be read."""
        self._last = entry_id
        try:
            batch = Batch.unpack(fields.get(b"batch", b""))
            self._newest_batch = entry_id.encode()
            return batch
        except InvalidMessage as error:
            letter = dead.letter("batches", str(error), fields, CONSUMER)
            dead.bury(self._broker, "batches", CONSUMER_GROUP, entry_id, letter)
            return None
