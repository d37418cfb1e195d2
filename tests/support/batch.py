"""A batch as the sampler and the generators would put it, for a learner under test."""

from __future__ import annotations

from common.messages import Batch
from common.payload import encode_payload
from common.streams.broker import Broker
from tests.support.learner import make_samples


def send_batch(broker: Broker, number: int, *, missing: tuple[int, ...] = (), by_turn: bool = False) -> None:
    """Put batch `number` on its stream, and its payloads but those `missing`.

    Args:
        by_turn: say each sample's advantage once for each of its two turns, and nothing of use for the whole.
    """
    payloads, advantages = make_samples(12, seed=number, version=number)
    ids = [f"{number}-{index}" for index in range(len(payloads))]
    for index, (sample_id, payload) in enumerate(zip(ids, payloads, strict=True)):
        if index not in missing:
            broker.redis.set(broker.key(f"payload:{sample_id}"), encode_payload(payload))
    batch = Batch(
        batch_id=number,
        sample_ids=ids,
        advantages=[0.0] * len(payloads) if by_turn else advantages,
        turn_advantages=[[advantage] * 2 for advantage in advantages] if by_turn else None,
        rewards=[float(advantage > 0) for advantage in advantages],
        tokens=[len(payload.token_ids) for payload in payloads],
    )
    broker.redis.xadd(broker.key("batches"), {"batch": batch.pack()})
