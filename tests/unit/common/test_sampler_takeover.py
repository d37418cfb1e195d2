"""A sampler takes over from another one: what it reads is the run at one moment, however long the reading takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.streams.broker import Broker
from common.streams.lease import LeaseLost
from common.streams.ledger import Commit, OutOfStep, SamplerLedger
from tests.support.streams import tasks


@pytest.fixture
def first(broker: Broker) -> SamplerLedger:
    ledger = SamplerLedger(broker, "first")
    ledger.acquire()
    return ledger


def when_read(broker: Broker, name: str, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something right before a key is read for the first time."""
    execute, key, done = broker.redis.execute_command, broker.key(name), []

    def executed(command: str, *arguments: Any, **options: Any) -> Any:
        if key in arguments and command.startswith("H") and not done:
            done.append(command)
            act()
        return execute(command, *arguments, **options)

    monkeypatch.setattr(broker.redis, "execute_command", executed)


def test_a_commit_in_the_middle_of_the_reading_is_not_read_by_halves(
    broker: Broker, first: SamplerLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = tasks(1)
    first.commit(Commit(dispatch=[(task, b"memo")]))

    def count() -> None:
        # The successor's lease ran out while it was reading; its predecessor, only paused, goes on.
        broker.redis.delete(broker.key("lease"))
        first.commit(Commit(open_add={"t0": b"sample"}, outstanding_remove=["t0"]))
        broker.redis.delete(broker.key("lease"))

    broker.redis.delete(broker.key("lease"))
    when_read(broker, "outstanding", count, monkeypatch)
    second = SamplerLedger(broker, "second")
    state = second.acquire()
    assert (state.open, state.outstanding) == ({"t0": b"sample"}, {})
    second.commit(Commit(open_remove=["t0"]))
    with pytest.raises((LeaseLost, OutOfStep)):
        first.commit(Commit(open_remove=["t0"]))


def test_who_loses_the_lease_while_reading_is_told(
    broker: Broker, first: SamplerLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.redis.delete(broker.key("lease"))
    when_read(broker, "outstanding", lambda: broker.redis.set(broker.key("lease"), "third"), monkeypatch)
    with pytest.raises(LeaseLost, match="third"):
        SamplerLedger(broker, "second").acquire(wait=0)


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


def test_a_lease_is_given_back_by_its_holder_alone(broker: Broker, first: SamplerLedger) -> None:
    SamplerLedger(broker, "second").release()
    assert broker.redis.get(broker.key("lease")) == b"first"
    first.release()
    assert broker.redis.get(broker.key("lease")) is None
