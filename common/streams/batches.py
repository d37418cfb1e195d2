"""The learner's side: batches in order, their payloads, and the steps it announces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from common.messages import Batch, InvalidMessage, Step
from common.payload import Payload, decode_if_valid
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
        for start, block in ((self._last, None), (">", block_ms or None)):
            found = self._broker.redis.xreadgroup(
                GROUP, CONSUMER, {self._broker.key("batches"): start}, count=1, block=block
            )
            if not found or not found[0][1]:
                continue
            entry_id, fields = found[0][1][0]
            self._last = entry_id.decode()
            try:
                batch = Batch.unpack((fields or {}).get(b"batch", b""))
            except InvalidMessage as error:
                note = dead.letter("batches", str(error), fields or {}, CONSUMER)
                dead.bury(self._broker, "batches", GROUP, self._last, note)
                return None
            self._entries[batch.batch_id] = self._last
            return batch
        return None

    def payloads(self, sample_ids: Sequence[str]) -> list[Payload | None]:
        """The samples' tokens; None where a payload is missing or invalid."""
        if not sample_ids:
            return []
        prefix = self._broker.key("payload:")
        return [
            decode_if_valid(data) for data in self._broker.redis.mget([prefix + sample_id for sample_id in sample_ids])
        ]

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
