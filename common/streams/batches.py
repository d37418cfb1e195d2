"""The learner's side: batches in order, their payloads, and the steps it announces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from common.messages import Batch, InvalidMessage, Step
from common.payload import Payload
from common.streams import dead
from common.streams.broker import Broker

GROUP = "learner"
# The learner is one per run, so its name is fixed and a restarted one finds its own unreleased batches.
CONSUMER = "learner"
STEPS_KEPT = 10_000


class BatchInbox:
    """The `batches` stream as the learner sees it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._entries: dict[int, str] = {}
        self._last = "0"
        broker.ensure_group("batches", GROUP)

    def next(self, block_ms: int = 1000) -> Batch | None:
        """The next batch, or None if none came in time.

        Batches that were delivered but not released come first, in order: after a crash they are trained on
        again from the checkpoint, and a reply that was lost on the way is read once more.
        """
        for after in (self._last, ">"):
            for entry_id, fields in self._broker.read_group(
                "batches", GROUP, CONSUMER, after=after, count=1, block_ms=block_ms
            ):
                return self._batch(entry_id.decode(), fields)
        return None

    def payloads(self, sample_ids: Sequence[str]) -> list[Payload | None]:
        """The samples' tokens; None where a payload is missing or invalid."""
        return self._broker.payloads("payload", sample_ids)

    def announce(self, step: Step) -> None:
        """Tell all processes that a version is published."""
        self._broker.redis.xadd(self._broker.key("steps"), {"step": step.pack()}, maxlen=STEPS_KEPT, approximate=True)

    def release(self, batches: Iterable[Batch]) -> int:
        """Acknowledge batches whose gradient a checkpoint holds and free their payloads."""
        batches = [batch for batch in batches if batch.batch_id in self._entries]
        if not batches:
            return 0
        arguments: list[Any] = [GROUP, len(batches)]
        arguments += [self._entries.pop(batch.batch_id) for batch in batches]
        for batch in batches:
            arguments += batch.sample_ids
        keys = [self._broker.key(name) for name in ("batches", "payload:", "counters")]
        return int(self._broker.script("release")(keys, arguments))

    def _batch(self, entry_id: str, fields: dict[bytes, bytes]) -> Batch | None:
        """The batch of an entry; None, and a dead letter, where it cannot be read."""
        self._last = entry_id
        try:
            batch = Batch.unpack(fields.get(b"batch", b""))
        except InvalidMessage as error:
            dead.bury(self._broker, "batches", GROUP, entry_id, dead.letter("batches", str(error), fields, CONSUMER))
            return None
        self._entries[batch.batch_id] = entry_id
        return batch
