"""Clocks that are set and processes that were cut off: living ones lose nothing, and what dead ones left is found."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from common.streams import relays
from common.streams.broker import Broker
from common.streams.lease import LeaseLost
from common.streams.ledger import SamplerLedger
from common.streams.presence import Presence
from common.streams.tasks import CONSUMER_GROUP, TaskInbox
from tests.support.streams import dispatch, evaluate, leased

HOUR = 3600


class Clocks:
    """The clock of all processes, and that of fakeredis, which is set `ahead` seconds from it."""

    def __init__(self) -> None:
        self.now, self.ahead = time.time(), 0.0

    def pass_time(self, seconds: float, inbox: TaskInbox) -> None:
        """Let time pass for a process that beats regularly, so that it does not look cut off."""
        for _ in range(4):
            self.now += seconds / 4
            inbox.beat([])


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr("time.time", lambda: clocks.now + clocks.ahead)
    for module in ("tasks", "ledger"):
        monkeypatch.setattr(f"common.streams.{module}.time", SimpleNamespace(monotonic=lambda: clocks.now))
    return clocks


@pytest.fixture
def broker(clocks: Clocks, fake_broker: Broker) -> Broker:
    return fake_broker


def test_a_clock_ahead_takes_no_task_from_a_living_generator(
    broker: Broker, ledger: SamplerLedger, clocks: Clocks
) -> None:
    dispatch(ledger, 3)
    living, other = TaskInbox(broker, "living"), TaskInbox(broker, "other")
    leased = living.take(3, 0)
    clocks.ahead = HOUR
    assert [other.adopt(3), other.adopt(3)] == [[], []]
    assert living.beat([delivery.entry_id for delivery in leased]).lost == set()


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_a_clock_that_is_set_delays_no_takeover(
    broker: Broker, ledger: SamplerLedger, clocks: Clocks, step: int
) -> None:
    dead, other = TaskInbox(broker, "dead"), TaskInbox(broker, "other")
    dead.beat([])
    clocks.ahead = step
    dispatch(ledger, 3)
    broker.read_group("tasks", CONSUMER_GROUP, dead.consumer, count=3)
    assert other.adopt(3) == [], "every generator counts as just heard from"
    clocks.pass_time(1.1 * broker.dead_after, other)
    assert len(other.adopt(3)) == 3


def test_a_dead_sampler_is_replaced_although_the_clock_went_back(
    broker: Broker, ledger: SamplerLedger, clocks: Clocks
) -> None:
    clocks.ahead = -HOUR
    successor = SamplerLedger(broker, "second")
    with pytest.raises(LeaseLost, match="already has a sampler"):
        successor.acquire(wait=0)
    clocks.now += 1.1 * broker.dead_after
    successor.acquire(wait=0)
    assert broker.redis.get(broker.key("lease")) == b"second"


def test_heartbeats_as_rare_as_they_may_be_are_no_outage(broker: Broker, ledger: SamplerLedger, clocks: Clocks) -> None:
    leased(ledger, 1, "dying")
    heir = TaskInbox(broker, "heir")
    for _ in range(3):
        heir.beat([])
        clocks.now += 0.51 * broker.dead_after
    assert len(heir.adopt(5)) == 1


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_processes_and_relays_are_listed_whatever_the_clock(broker: Broker, clocks: Clocks, step: int) -> None:
    def beat(*names: str) -> None:
        for name in names:
            Presence(broker, name, "generator").beat()
            relays.announce(broker, "here", name, {"address": "tcp://127.0.0.1:1"})

    beat("living", "dead")
    clocks.ahead = step
    beat("living")
    assert list(broker.processes()) == ["living"]
    assert [relay["name"] for relay in relays.nearby(broker, "here")] == ["living"]


def test_a_process_that_was_cut_off_takes_nothing_over(broker: Broker, ledger: SamplerLedger, clocks: Clocks) -> None:
    dispatch(ledger, 2)
    other, back = TaskInbox(broker, "other"), TaskInbox(broker, "back")
    other.take(2, 0)
    back.beat([])
    clocks.now += 1.5 * broker.dead_after  # Redis was away for all of them
    assert [back.adopt(5), back.adopt(5)] == [[], []]
    clocks.pass_time(1.1 * broker.dead_after, back)
    assert len(back.adopt(5)) == 2, "the other has not come back"


def test_a_sampler_that_was_cut_off_keeps_an_evaluation(broker: Broker, ledger: SamplerLedger, clocks: Clocks) -> None:
    evaluate(ledger)
    generator = TaskInbox(broker, "pinned")
    generator.lease(3, 1, 0)

    def unseen_after(seconds: float) -> float:
        clocks.now += seconds
        pin = ledger.pin("e0")
        assert pin is not None
        assert pin.version == 3
        return pytest.approx(pin.unseen)

    look = broker.dead_after / 4
    assert [unseen_after(0.0), unseen_after(look)] == [0, look]
    assert unseen_after(1.5 * broker.dead_after) == 0, "Redis was away for the generator too"
    assert [unseen_after(look) for _ in range(4)] == [look, 2 * look, 3 * look, 4 * look], "it does not come back"
    generator.lease(3, 1, 0)
    assert unseen_after(look) == 0


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_no_clock_gives_an_evaluation_up(broker: Broker, ledger: SamplerLedger, clocks: Clocks, step: int) -> None:
    evaluate(ledger)
    inbox = TaskInbox(broker, "a")
    assert inbox.lease(0, 0, 0).evaluation == "e0"

    def unseen() -> float:
        pin = ledger.pin("e0")
        assert pin is not None
        assert pin.version == 0
        return pin.unseen

    assert unseen() == 0
    clocks.ahead = step
    for quarters in range(1, 5):
        clocks.now += broker.dead_after / 4
        assert unseen() == pytest.approx(quarters * broker.dead_after / 4)
    inbox.lease(0, 0, 0)
    assert unseen() == 0
