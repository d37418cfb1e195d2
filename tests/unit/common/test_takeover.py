"""Takeovers of what dead processes have left, and of nothing else: tasks, the sampler's lease, the learner's place."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from common.messages import Batch, Step
from common.streams.batches import BatchInbox, RunLost
from common.streams.broker import Broker
from common.streams.lease import LeaseLost, RedisBehind, Replaced
from common.streams.ledger import Commit, SamplerLedger
from common.streams.presence import Presence
from common.streams.steps import latest
from common.streams.tasks import CONSUMER_GROUP, Delivery, TaskInbox
from tests.support.streams import (
    dispatch,
    evaluate,
    finished,
    leased,
    lose_reply,
    put_back,
    saved_keys,
    silence,
    tasks,
)


def names(deliveries: list[Delivery]) -> list[str]:
    return [delivery.task.task_id for delivery in deliveries]


def test_takeover_begins_again_at_the_front(broker: Broker, ledger: SamplerLedger) -> None:
    dying, _ = leased(ledger, 30, "dying")
    for name in ("heir", "next"):
        heir = TaskInbox(broker, name)
        silence(broker, dying)
        assert sorted(names([task for _ in range(8) for task in heir.adopt(4)])) == sorted(f"t{i}" for i in range(30))
        dying = heir


def test_whoever_beats_keeps_its_tasks(broker: Broker, ledger: SamplerLedger) -> None:
    stopped, deliveries = leased(ledger, 3, "stopped")
    other, ids = TaskInbox(broker, "other"), {delivery.entry_id for delivery in deliveries}
    silence(broker, stopped)
    assert stopped.beat(ids).lost == set()
    assert other.adopt(5) == []
    silence(broker, stopped)
    taken_over = other.adopt(2)
    taken = {delivery.entry_id for delivery in taken_over}
    assert stopped.beat(ids).lost == taken
    assert stopped.beat(ids - taken).lost == set()
    assert stopped.requeue(deliveries) == 1, "what was taken over cannot be given back"
    assert other.beat(taken).lost == set(), "it is still the heir's"
    assert other.finish([finished(delivery) for delivery in taken_over]) == 2


def test_a_task_lost_in_a_reply_is_leased_once_more(broker: Broker, ledger: SamplerLedger) -> None:
    dispatch(ledger, 3)
    generator, other = TaskInbox(broker, "unlucky"), TaskInbox(broker, "other")
    lose_reply(broker, generator)
    (first,) = generator.take(1, 0)
    generator.beat([first.entry_id])
    lose_reply(broker, generator, seconds=0)
    assert other.adopt(5) == []
    (again,) = generator.adopt(5)
    assert (again.task.task_id, again.attempt) == ("t0", 2)
    assert generator.adopt(5) == [], "what came just now may still be on its way"
    assert generator.finish([finished(first), finished(again)]) == 2


def test_a_restarted_process_does_not_hold_the_old_tasks(broker: Broker, ledger: SamplerLedger) -> None:
    before, _ = leased(ledger, 2, "same")
    silence(broker, before)
    TaskInbox(broker, "same").beat([])
    assert [delivery.attempt for delivery in TaskInbox(broker, "other").adopt(5)] == [2, 2]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_dead_generators_task_of_an_evaluation_is_found(broker: Broker, ledger: SamplerLedger, leaves: bool) -> None:
    evaluate(ledger)
    dying, heir = TaskInbox(broker, "dying"), TaskInbox(broker, "heir")
    dying.lease(0, 1, 0)  # the reply is lost
    if leaves:
        dying.leave()
    silence(broker, dying, seconds=10_000)
    assert heir.adopt(5) == []
    assert names(heir.adopt(5, "e0")) == ["e0-0"]


def test_a_lease_makes_a_forgotten_generator_known_again(broker: Broker, ledger: SamplerLedger) -> None:
    dispatch(ledger, 2)
    cut_off, heir = TaskInbox(broker, "cut off"), TaskInbox(broker, "heir")
    (first,) = cut_off.lease(-1, 1, 1).deliveries
    broker.redis.delete(broker.key("holders:tasks"))
    cut_off.lease(-1, 1, 1)
    silence(broker, cut_off)
    assert len(heir.adopt(5)) == 2
    assert cut_off.beat([first.entry_id]).lost == {first.entry_id}


def test_a_heartbeat_after_being_forgotten_looks_at_every_task(broker: Broker, ledger: SamplerLedger) -> None:
    frozen, deliveries = leased(ledger, 2, "frozen")
    heir, ids = TaskInbox(broker, "heir"), {delivery.entry_id for delivery in deliveries}
    frozen.beat(ids)
    silence(broker, frozen, seconds=10_000)
    assert len(heir.adopt(5)) == 2
    heir.adopt(5)
    assert broker.redis.zscore(broker.key("holders:tasks"), frozen.consumer) is None
    assert broker.redis.hgetall(broker.key("takeovers:tasks")) == {}
    (consumer,) = broker.redis.xinfo_consumers(broker.key("tasks"), CONSUMER_GROUP)
    assert consumer["name"] == heir.consumer.encode()
    frozen.lease(-1, 0, 0)
    assert frozen.beat(ids).lost == ids


def test_a_beat_checks_new_tasks_later(broker: Broker, ledger: SamplerLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch(ledger, 4)
    slow, heir = TaskInbox(broker, "slow"), TaskInbox(broker, "heir")
    before = [delivery.entry_id for delivery in slow.take(2, 0)]
    slow.beat(before)
    slow.beat(before)
    new = [delivery.entry_id for delivery in slow.take(1, 0)]
    silence(broker, slow)
    assert len(heir.adopt(5)) == 3
    assert slow.beat(before).lost == set(before)
    assert slow.beat(new).lost == set(new)
    slow.take(1, 0)
    monkeypatch.setattr(slow, "_lost", lambda entry_ids: pytest.fail("nothing was taken over since"))
    assert slow.beat([]).lost == set()


def test_a_replaced_sampler_cannot_write(broker: Broker, ledger: SamplerLedger) -> None:
    with pytest.raises(LeaseLost, match="already has a sampler"):
        SamplerLedger(broker, "second").acquire(wait=0)
    SamplerLedger(broker, "second").release()
    assert broker.redis.get(broker.key("lease")) == b"first", "a lease is given back by its holder alone"
    broker.redis.delete(broker.key("lease"))
    successor = SamplerLedger(broker, "second")
    successor.acquire()
    with pytest.raises(LeaseLost):
        ledger.commit(Commit(counters={"late": 1}))
    assert "late" not in broker.counters()
    successor.commit(Commit(counters={"late": 1}))
    successor.release()
    assert broker.redis.get(broker.key("lease")) is None
    for attempt in (ledger.renew, lambda: ledger.commit(Commit(counters={"late": 1}))):
        with pytest.raises(LeaseLost):
            attempt()
    assert broker.counters()["late"] == 1


@pytest.mark.integration
def test_a_sampler_that_died_on_this_host_is_replaced_at_once(broker: Broker) -> None:
    if (gone := os.fork()) == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    SamplerLedger(broker, f"{socket.gethostname()}/{gone}/x").acquire()
    SamplerLedger(broker, "heir").acquire(wait=0)
    assert broker.redis.get(broker.key("lease")) == b"heir"


def when_read(broker: Broker, name: str, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    execute, key, done = broker.redis.execute_command, broker.key(name), []

    def executed(command: str, *arguments: Any, **options: Any) -> Any:
        if key in arguments and command.startswith("H") and not done:
            done.append(command)
            act()
        return execute(command, *arguments, **options)

    monkeypatch.setattr(broker.redis, "execute_command", executed)


def test_no_commit_is_read_by_halves(broker: Broker, ledger: SamplerLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.commit(Commit(dispatch=[(tasks(1)[0], b"memo")]))

    def count() -> None:
        # The successor's lease ran out while it was reading; its predecessor, only paused, goes on.
        broker.redis.delete(broker.key("lease"))
        ledger.commit(Commit(open_add={"t0": b"sample"}, outstanding_remove=["t0"]))
        broker.redis.delete(broker.key("lease"))

    broker.redis.delete(broker.key("lease"))
    when_read(broker, "outstanding", count, monkeypatch)
    second = SamplerLedger(broker, "second")
    state = second.acquire()
    assert (state.open, state.outstanding) == ({"t0": b"sample"}, {})
    broker.redis.delete(broker.key("lease"))
    when_read(broker, "outstanding", lambda: broker.redis.set(broker.key("lease"), "third"), monkeypatch)
    with pytest.raises(LeaseLost, match="third"):
        SamplerLedger(broker, "fourth").acquire(wait=0)


def test_the_lease_is_renewed_while_many_rows_are_read(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.dead_after = 20.0
    rows = {f"p{i}": b"%d" % i for i in range(3000)}
    ledger = SamplerLedger(broker, "first")
    ledger.acquire()
    ledger.commit(Commit(tracker=rows))
    ledger.release()
    execute, left = broker.redis.execute_command, []

    def executed(command: str, *arguments: Any, **options: Any) -> Any:
        reply = execute(command, *arguments, **options)
        if broker.key("tracker") in arguments and command.startswith("H"):
            left.append(broker.redis.pttl(broker.key("lease")))
            # Every slice takes so long that the lease has nearly run out.
            broker.redis.pexpire(broker.key("lease"), 2000)
        return reply

    monkeypatch.setattr(broker.redis, "execute_command", executed)
    monkeypatch.setattr("common.streams.lease.RENEW_EVERY", 0.0)
    assert SamplerLedger(broker, "second").acquire().tracker == rows
    assert len(left) > 1
    assert min(left) > 10_000


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
        pytest.raises(Replaced, match=r"already has a learner \(machine-a/1/x\)"),
        Presence(broker, "learner", "learner", interval=60.0),
    ):
        # One that was replaced leaves its successor's entry.
        BatchInbox(broker, "machine-b/1/y").acquire(wait=0)
    assert "learner" in broker.processes()
    first.check()


def test_a_restored_or_emptied_redis_obeys_the_newest_learner(broker: Broker) -> None:
    first = BatchInbox(broker, "machine-a/1/x").acquire()
    before = broker.redis.hgetall(broker.key("learner"))
    second = BatchInbox(broker, "machine-b/1/y").acquire(wait=0)
    broker.redis.hset(broker.key("learner"), mapping=before)
    second.announce(Step(version=1))
    with pytest.raises(Replaced):
        first.check()
    broker.redis.flushall()
    with pytest.raises(RunLost):
        second.announce(Step(version=1))
    with pytest.raises(RunLost):
        second.next(block_ms=1)
    assert latest(broker) is None
    BatchInbox(broker, "machine-c/1/z").acquire(wait=0)
    with pytest.raises(Replaced, match="machine-c/1/z"):
        first.check()  # both are the first learner that their Redis had


def test_a_redis_without_the_newest_batch_or_step_is_behind(broker: Broker, ledger: SamplerLedger) -> None:
    batches = [Batch(batch_id=i, sample_ids=[f"t{i}"], advantages=[0.5], rewards=[1.0], tokens=[10]) for i in (0, 1)]
    learner = BatchInbox(broker).acquire()
    ledger.commit(Commit(batches=batches[:1]))
    learner.next(0)
    learner.announce(Step(version=0))
    older = saved_keys(broker)
    ledger.commit(Commit(batches=batches[1:]))
    learner.next(0)
    put_back(broker, older)
    attempts = (learner.check, lambda: learner.announce(Step(version=2)), lambda: learner.set_address(ADDRESS))
    for attempt in attempts:
        with pytest.raises(RedisBehind, match="came back with an older state of run"):
            attempt()
    assert broker.endpoint("weights") is None
    again = BatchInbox(broker).acquire(0)
    assert again.next(0) == batches[0]
    assert again.release_before(1) == 1
    again.check()  # it has released that batch itself
    again.announce(Step(version=1))
    broker.redis.xtrim(broker.key("steps"), maxlen=0)
    with pytest.raises(RedisBehind):
        again.check()


def test_a_reset_has_the_learner_start_again_and_redis_knows_the_run(broker: Broker, ledger: SamplerLedger) -> None:
    assert BatchInbox(broker).is_new()
    ledger.reset()
    assert BatchInbox(broker).is_new(), "a Redis that was emptied takes no run for its own by a reset"
    learner = BatchInbox(broker).acquire()
    learner.announce(Step(version=3))
    ledger.commit(Commit(dispatch=[(tasks(1)[0], b"memo")], tracker={"p0": b"row"}))
    TaskInbox(broker, "before").take(1, 0)
    assert broker.redis.exists(broker.key("holders:tasks"))
    ledger.reset()
    assert not broker.redis.exists(broker.key("holders:tasks")), "each generator finds its tasks gone"
    with pytest.raises(RedisBehind):
        learner.check()
    assert latest(broker) is None
    assert (ledger.acquire().tracker, TaskInbox(broker, "g").take(1, 0)) == ({}, [])
    again = BatchInbox(broker)
    assert not again.is_new()
    again.acquire(0).check()
    SamplerLedger(broker, "second").release()
    broker.redis.set(broker.key("lease"), "second")
    with pytest.raises(LeaseLost):
        ledger.reset()
    again.check()
