"""A run has one learner: one that was replaced while it stood still changes nothing when it wakes up."""

from __future__ import annotations

import pytest

from common.messages import Batch, Step
from common.streams.batches import BatchInbox, RunLost, latest
from common.streams.broker import Broker
from common.streams.lease import Replaced
from common.streams.presence import Presence

ADDRESS = {"address": "tcp://127.0.0.1:5555"}


def test_a_replaced_learner_changes_nothing(broker: Broker) -> None:
    replaced = BatchInbox(broker, "machine-a/1/x").acquire()
    replaced.announce(Step(version=2))
    second = BatchInbox(broker, "machine-b/1/y").acquire(wait=0)
    second.announce(Step(version=3))
    second.set_address(ADDRESS)
    batch = Batch(batch_id=0, sample_ids=["t0"], advantages=[0.5], rewards=[1.0], tokens=[10])
    broker.redis.xadd(broker.key("batches"), {"batch": batch.pack()})
    broker.redis.set(broker.key("payload:t0"), b"tokens")
    for attempt in (
        replaced.check,
        lambda: replaced.announce(Step(version=9)),
        lambda: replaced.set_address({"address": "tcp://127.0.0.1:1"}),
        lambda: replaced.release_before(1),
    ):
        with pytest.raises(Replaced, match="machine-b/1/y"):
            attempt()
    step = latest(broker)
    assert step is not None
    assert step.version == 3
    assert broker.endpoint("weights") == ADDRESS
    assert broker.redis.xlen(broker.key("batches")) == 1
    assert broker.redis.exists(broker.key("payload:t0"))


def test_while_a_learner_lives_no_other_takes_its_place(broker: Broker) -> None:
    first = BatchInbox(broker, "machine-a/1/x").acquire()
    with (
        Presence(broker, "learner", "learner", interval=60.0),
        pytest.raises(Replaced, match=r"already has a learner \(machine-a/1/x\)"),
    ):
        BatchInbox(broker, "machine-b/1/y").acquire(wait=0)
    first.check()


def test_a_replaced_learner_leaves_its_successors_entry(broker: Broker) -> None:
    def leave_replaced() -> None:
        with Presence(broker, "learner", "learner", interval=60.0):
            Presence(broker, "learner", "learner").beat()
            raise Replaced("another one")

    with pytest.raises(Replaced):
        leave_replaced()
    assert "learner" in broker.processes()


def test_a_restored_redis_obeys_the_newest_learner(broker: Broker) -> None:
    BatchInbox(broker, "machine-a/1/x").acquire()
    before = broker.redis.hgetall(broker.key("learner"))
    second = BatchInbox(broker, "machine-b/1/y").acquire(wait=0)
    broker.redis.hset(broker.key("learner"), mapping=before)
    second.announce(Step(version=1))
    with pytest.raises(Replaced):
        BatchInbox(broker, "machine-a/1/x").check()


def test_a_redis_that_was_emptied_is_a_lost_run(broker: Broker) -> None:
    learner = BatchInbox(broker).acquire()
    broker.redis.flushall()
    with pytest.raises(RunLost):
        learner.announce(Step(version=1))
    with pytest.raises(RunLost):
        learner.next(block_ms=1)
    assert latest(broker) is None
