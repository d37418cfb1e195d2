"""Clocks that are set, processes cut off, and schedules drawn by chance: each result comes to the sampler once."""

from __future__ import annotations

import random
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from common.streams import relays
from common.streams.broker import Broker
from common.streams.lease import LeaseLost
from common.streams.ledger import Commit, SamplerLedger
from common.streams.presence import Presence
from common.streams.tasks import CONSUMER_GROUP, Delivery, TaskInbox
from tests.support.streams import dispatch, evaluate, finished, leased, put_back, saved_keys, silence, tasks

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


def test_a_clock_ahead_takes_no_task_from_the_living(broker: Broker, ledger: SamplerLedger, clocks: Clocks) -> None:
    dispatch(ledger, 3)
    living, other = TaskInbox(broker, "living"), TaskInbox(broker, "other")
    leased = living.take(3, 0)
    clocks.ahead = HOUR
    assert [other.adopt(3), other.adopt(3)] == [[], []]
    assert living.beat([delivery.entry_id for delivery in leased]).lost == set()


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_setting_a_clock_delays_no_takeover(broker: Broker, ledger: SamplerLedger, clocks: Clocks, step: int) -> None:
    dead, other = TaskInbox(broker, "dead"), TaskInbox(broker, "other")
    dead.beat([])
    clocks.ahead = step
    dispatch(ledger, 3)
    broker.read_group("tasks", CONSUMER_GROUP, dead.consumer, count=3)
    assert other.adopt(3) == [], "every generator counts as just heard from"
    clocks.pass_time(1.1 * broker.dead_after, other)
    assert len(other.adopt(3)) == 3


def test_a_clock_set_back_does_not_keep_a_dead_sampler(broker: Broker, ledger: SamplerLedger, clocks: Clocks) -> None:
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


def unseen(ledger: SamplerLedger, version: int) -> float:
    """Seconds for which no generator with the evaluation's version was seen."""
    pin = ledger.pin("e0")
    assert pin is not None
    assert pin.version == version
    return pin.unseen


def test_a_sampler_that_was_cut_off_keeps_an_evaluation(broker: Broker, ledger: SamplerLedger, clocks: Clocks) -> None:
    evaluate(ledger)
    generator = TaskInbox(broker, "pinned")
    generator.lease(3, 1, 0)

    def unseen_after(seconds: float) -> float:
        clocks.now += seconds
        return pytest.approx(unseen(ledger, 3))

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
    assert unseen(ledger, 0) == 0
    clocks.ahead = step
    for quarters in range(1, 5):
        clocks.now += broker.dead_after / 4
        assert unseen(ledger, 0) == pytest.approx(quarters * broker.dead_after / 4)
    inbox.lease(0, 0, 0)
    assert unseen(ledger, 0) == 0


ACTS = ["take", "take", "adopt", "finish", "finish", "requeue", "beat", "die", "save", "restore"]


class Schedule:
    """Generators that do by chance whatever they may do, also with tasks taken over; Redis may go back in time."""

    def __init__(self, broker: Broker, seed: int) -> None:
        self.broker, self.random = broker, random.Random(seed)
        self.held: dict[TaskInbox, list[Delivery]] = {}
        self.older: dict[bytes, bytes] = {}
        for _ in range(3):
            self.start()

    def start(self) -> None:
        self.held[TaskInbox(self.broker, f"p{len(self.held)}")] = []

    def step(self) -> None:
        inbox = self.random.choice(list(self.held))
        held = self.held[inbox]
        some = [delivery for delivery in held if self.random.random() < 0.5]
        act = self.random.choice(ACTS)
        if act == "take":
            held += inbox.take(self.random.randint(1, 3), 0)
        elif act == "adopt":
            held += inbox.adopt(3)
        elif act == "finish":
            inbox.finish([finished(delivery) for delivery in some])
        elif act == "requeue":
            inbox.requeue(some)
        elif act == "beat":
            inbox.beat([delivery.entry_id for delivery in held])
        elif act == "die":
            silence(self.broker, inbox)
            self.start()
        elif act == "save":
            self.older = saved_keys(self.broker)
        elif self.older:
            put_back(self.broker, self.older)
            self.pass_a_millisecond()

    def pass_a_millisecond(self) -> None:
        """No server answers again so soon after it was restored that an entry would get the id of a lost one."""
        start = self.broker.redis.time()[1] // 1000
        while self.broker.redis.time()[1] // 1000 == start:
            pass

    def end(self) -> None:
        for inbox in self.held:
            silence(self.broker, inbox)
        inbox = TaskInbox(self.broker, "last")
        while deliveries := inbox.adopt(100) + inbox.take(100, 0):
            inbox.finish([finished(delivery) for delivery in deliveries])


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_each_episode_arrives_once_with_its_tokens(fake_broker: Broker, seed: int) -> None:
    ledger = SamplerLedger(fake_broker, "first")
    ledger.acquire()
    dispatch(ledger, 10)
    schedule = Schedule(fake_broker, seed)
    for _ in range(80):
        schedule.step()
    schedule.end()
    arrived = ledger.read(block_ms=0)
    assert Counter(header.task_id for _, header in arrived) == Counter(task.task_id for task in tasks(10))
    assert {header.status for _, header in arrived} == {"ok"}
    assert None not in fake_broker.payloads("payload", [f"t{i}" for i in range(10)])
    assert fake_broker.redis.xlen(fake_broker.key("tasks")) == 0
    ledger.commit(Commit(counted=[entry_id for entry_id, _ in arrived]))
    counters = fake_broker.counters()
    assert [counters[name] for name in ("dispatched", "finished", "counted")] == [10, 10, 10]
