"""The stream `journal`: what every commit of the sampler changed, for whoever audits the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgpack

from common.streams.broker import Broker
from common.unpack import unpack

PAGE = 500


@dataclass(frozen=True, slots=True)
class Entry:
    """One commit.

    Attributes:
        sequence: its number, 1 more than that of the one before.
        rewards: prompt id, reward and forgetting factor of each value that was updated, in order.
        dispatched, counted: task ids.
        batches: number and sample ids of each.
        discarded: samples that nobody will train on.
    """

    sequence: int
    rewards: Sequence[tuple[str, float, float]]
    dispatched: Sequence[str]
    counted: Sequence[str]
    batches: Sequence[tuple[int, Sequence[str]]]
    discarded: Sequence[str]

    def pack(self) -> bytes:
        """As it stands in the stream."""
        fields = (self.sequence, self.rewards, self.dispatched, self.counted, self.batches, self.discarded)
        return bytes(msgpack.packb(fields))


def read_journal(broker: Broker) -> Iterator[Entry]:
    """Every commit, oldest first."""
    after = "-"
    while entries := broker.redis.xrange(broker.key("journal"), min=after, count=PAGE):
        for entry_id, fields in entries:
            yield Entry(*unpack(fields[b"commit"]))
            after = f"({entry_id.decode()}"
