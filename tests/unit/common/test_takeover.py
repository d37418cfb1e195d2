"""Tasks of generators that died are taken over, and nobody else's."""

from __future__ import annotations

import pytest

from common.streams.broker import Broker
from common.streams.ledger import SamplerLedger
from common.streams.tasks import GROUP, TaskInbox
from tests.support.streams import dispatch, finished


@pytest.fixture
def ledger(broker: Broker) -> SamplerLedger:
    ledger = SamplerLedger(broker, "first")
    ledger.acquire()
    return ledger


def silence(broker: Broker, inbox: TaskInbox) -> None:
    """Make all tasks in a generator's hands look untouched for two minutes, as if it had died."""
    key = broker.key("tasks")
    for item in broker.redis.xpending_range(key, GROUP, "-", "+", 10_000, inbox.consumer):
        broker.redis.xclaim(key, GROUP, inbox.consumer, 0, [item["message_id"]], idle=120_000, justid=True)


@pytest.mark.integration
def test_a_dead_task_behind_many_live_ones_is_found_by_generators_with_one_free_slot(real_broker: Broker) -> None:
    ledger = SamplerLedger(real_broker, "first")
    ledger.acquire()
    dispatch(ledger, 1500)
    live, dead = TaskInbox(real_broker, "live"), TaskInbox(real_broker, "dead")
    live.take(1499, 0)
    (lost,) = dead.take(1, 0)
    silence(real_broker, dead)
    found = [delivery for name in ("a", "b", "c") for delivery in TaskInbox(real_broker, name).adopt(1)]
    assert [(delivery.task, delivery.attempt) for delivery in found] == [(lost.task, 2)]


def test_takeover_begins_again_at_the_front(broker: Broker, ledger: SamplerLedger) -> None:
    dispatch(ledger, 30)
    dying, heir = TaskInbox(broker, "dying"), TaskInbox(broker, "heir")
    dying.take(30, 0)
    silence(broker, dying)
    names = [delivery.task.task_id for _ in range(8) for delivery in heir.adopt(4)]
    assert sorted(names) == sorted(f"t{i}" for i in range(30))
    silence(broker, heir)
    again = [delivery.task.task_id for _ in range(8) for delivery in TaskInbox(broker, "next").adopt(4)]
    assert sorted(again) == sorted(names)


def test_a_task_that_was_taken_over_cannot_be_given_back_by_the_one_it_was_taken_from(
    broker: Broker, ledger: SamplerLedger
) -> None:
    dispatch(ledger, 1)
    slow, quick = TaskInbox(broker, "slow"), TaskInbox(broker, "quick")
    leased = slow.take(1, 0)
    silence(broker, slow)
    (taken_over,) = quick.adopt(1)
    assert slow.requeue(leased) == 0
    assert quick.beat([taken_over.entry_id]) == set(), "it is still the heir's"
    assert quick.finish([finished(taken_over)]) == 1
