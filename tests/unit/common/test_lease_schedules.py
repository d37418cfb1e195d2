"""Whatever generators and Redis go through, each task's result comes to the sampler once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from common.streams.broker import Broker
from common.streams.ledger import Commit, SamplerLedger
from common.streams.tasks import Delivery, TaskInbox
from tests.support.streams import dispatch, finished, put_back, saved_keys, silence, tasks

ACTS = ["take", "take", "adopt", "finish", "finish", "requeue", "beat", "die", "save", "restore"]


class Schedule:
    """Generators that do by chance whatever they may do, dying and a Redis restored to an older state too.

    A generator goes on with the tasks that others have taken over from it.
    """

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

        def milliseconds() -> int:
            seconds, micros = self.broker.redis.time()
            return int(seconds * 1000 + micros // 1000)

        start = milliseconds()
        while milliseconds() == start:
            pass

    def end(self) -> None:
        """All die; new processes do the rest."""
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
