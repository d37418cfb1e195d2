"""A run has one learner: one that was replaced while it stood still changes nothing when it wakes up."""

from __future__ import annotations

import pytest

from common.messages import Batch, Step
from common.streams.batches import BatchInbox, RunLost, latest
from common.streams.broker import Broker
from common.streams.lease import Replaced
from common.streams.presence import Presence

ADDRESS = {"address": "tcp://127.0.0.1:5555"}


@pytest.fixture
def replaced(broker: Broker) -> BatchInbox:
    """The first of two learners; the second has announced version 3 and its address."""
    first = BatchInbox(broker, "machine-a/1/x").acquire()
    first.announce(Step(version=2))
    second = BatchInbox(broker, "machine-b/1/y").acquire(wait=0)
    second.announce(Step(version=3))
    second.set_address(ADDRESS)
    return first


def test_a_replaced_learner_announces_nothing(broker: Broker, replaced: BatchInbox) -> None:
    with pytest.raises(Replaced, match="machine-b/1/y"):
        replaced.announce(Step(version=9))
    step = latest(broker)
    assert step is not None
    assert step.version == 3


def test_a_replaced_learner_leaves_the_address_of_the_weights(broker: Broker, replaced: BatchInbox) -> None:
    with pytest.raises(Replaced):
        replaced.set_address({"address": "tcp://127.0.0.1:1"})
    assert broker.endpoint("weights") == ADDRESS


def test_a_replaced_learner_releases_no_batch(broker: Broker, replaced: BatchInbox) -> None:
    batch = Batch(batch_id=0, sample_ids=["t0"], advantages=[0.5], rewards=[1.0], tokens=[10])
    broker.redis.xadd(broker.key("batches"), {"batch": batch.pack()})
    broker.redis.set(broker.key("payload:t0"), b"tokens")
    with pytest.raises(Replaced):
        replaced.release_before(1)
    assert broker.redis.xlen(broker.key("batches")) == 1
    assert broker.redis.exists(broker.key("payload:t0"))


def test_a_replaced_learner_is_told_before_it_trains(replaced: BatchInbox) -> None:
    with pytest.raises(Replaced):
        replaced.check()


def test_while_a_learner_lives_no_other_takes_its_place(broker: Broker) -> None:
    first = BatchInbox(broker, "machine-a/1/x").acquire()
    with (
        Presence(broker, "learner", "learner", interval=60.0),
        pytest.raises(Replaced, match=r"already has a learner \(machine-a/1/x\)"),
    ):
        BatchInbox(broker, "machine-b/1/y").acquire(wait=0)
    first.check()


def test_the_entry_of_the_new_learner_stays_when_the_replaced_one_leaves(broker: Broker) -> None:
    def leave_replaced() -> None:
        with Presence(broker, "learner", "learner", interval=60.0):
            Presence(broker, "learner", "learner").beat()
            raise Replaced("another one")

    with pytest.raises(Replaced):
        leave_replaced()
    assert "learner" in broker.processes()


def test_a_redis_that_went_back_in_time_still_obeys_the_newest_learner(broker: Broker) -> None:
    BatchInbox(broker, "machine-a/1/x").acquire()
    before = broker.redis.hgetall(broker.key("learner"))
    second = BatchInbox(broker, "machine-b/1/y").acquire(wait=0)
    broker.redis.hset(broker.key("learner"), mapping=before)
    second.announce(Step(version=1))
    with pytest.raises(Replaced):
        BatchInbox(broker, "machine-a/1/x").check()


def test_a_redis_that_is_empty_is_noticed(broker: Broker) -> None:
    learner = BatchInbox(broker).acquire()
    broker.redis.flushall()
    with pytest.raises(RunLost):
        learner.announce(Step(version=1))
    assert latest(broker) is None


def test_a_redis_that_was_emptied_since_the_last_look_is_a_lost_run(fake_broker: Broker) -> None:
    inbox = BatchInbox(fake_broker).acquire(0)
    fake_broker.redis.flushall()
    with pytest.raises(RunLost):
        inbox.next(block_ms=1)
