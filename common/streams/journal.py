"""The stream `journal`: what every commit of the sampler changed, for whoever audits the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

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
        restored: what this commit took from the run folder, after Redis was lost: `version` at which the run goes on,
            and tasks `dispatched` before it; `rows` of the tracker by prompt id, packed; state of its `population`.
    """

    sequence: int
    rewards: Sequence[tuple[str, float, float]]
    dispatched: Sequence[str]
    counted: Sequence[str]
    batches: Sequence[tuple[int, Sequence[str]]]
    discarded: Sequence[str]
    restored: Mapping[str, Any] = field(default_factory=dict)

    def pack(self) -> bytes:
        """As it stands in the stream."""
        return bytes(msgpack.packb([getattr(self, item.name) for item in fields(self)]))


def read_journal(broker: Broker) -> Iterator[Entry]:
    """Every commit, oldest first."""
    after = "-"
    while page := broker.redis.xrange(broker.key("journal"), min=after, count=PAGE):
        for entry_id, values in page:
            yield Entry(*unpack(values[b"commit"]))
            after = f"({entry_id.decode()}"
