"""Redis at its `maxmemory`: what frees memory goes on, what needs it waits before the limit is reached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from common.errors import UserError
from common.messages import Batch, Step
from common.streams import dead, relays
from common.streams.agreement import agree
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.ledger import Commit, SamplerLedger
from common.streams.presence import Presence
from common.streams.tasks import TaskInbox
from tests.conftest import RedisServer
from tests.support.sampler import make_config
from tests.support.sampler_driving import audited, drive, reach, started
from tests.support.streams import dispatch, finished


@pytest.fixture
def broker(redis_server: RedisServer, real_broker: Broker) -> Iterator[Broker]:
    yield real_broker
    real_broker.redis.config_set("maxmemory", 0)


def fill(broker: Broker) -> None:
    """From now on Redis refuses whatever needs memory."""
    broker.redis.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.ResponseError, match="OOM|maxmemory"):
        broker.redis.set(broker.key("another"), 1)


def test_a_redis_that_may_drop_samples_is_refused_at_any_time(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, generator, learner = started(broker, tmp_path)
    reach(sampler, generator, learner, 1)
    broker.redis.config_set("maxmemory-policy", "volatile-ttl")
    monkeypatch.setattr("sampler.memory_watch.INTERVAL", 0.0)
    try:
        for use in (lambda: agree(broker, sampler.config), broker.memory_is_short, sampler.round):
            with pytest.raises(
                UserError, match="maxmemory-policy volatile-ttl: .*CONFIG SET maxmemory-policy noeviction"
            ):
                use()
    finally:
        broker.redis.config_set("maxmemory-policy", "noeviction")
    agree(broker, sampler.config)


def test_what_leads_out_of_a_full_redis_works_there(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    agree(broker, config)
    first = SamplerLedger(broker, "first")
    first.acquire()
    dispatch(first, 6)
    generator = TaskInbox(broker, "g")
    done, returned, kept, _, *others = generator.take(6, 0)
    generator.finish([finished(delivery) for delivery in (done, *others)])
    first.release()
    learner = BatchInbox(broker, "old").acquire()
    first.acquire()
    first.commit(Commit(batches=[Batch(batch_id=0, sample_ids=["t9"], advantages=[0], rewards=[0], tokens=[1])]))
    broker.redis.set(broker.key("payload:t9"), b"tokens")
    first.release()

    fill(broker)
    # Every process starts again, says so, and goes on.
    agree(broker, config)
    with Presence(broker, "g", "generator", interval=60):
        assert "g" in broker.processes()
    TaskInbox(broker, "g").beat([])
    assert generator.finish([finished(kept)]) == 1
    assert generator.finish([finished(kept)]) == 0
    assert generator.requeue([returned]) == 1
    assert len(generator.lease(0, 5, 5).deliveries) == 1
    assert generator.adopt(5) == []
    generator.leave()
    ledger = SamplerLedger(broker, "second")
    ledger.acquire()
    headers = ledger.read(block_ms=0)
    assert ledger.commit(Commit(counted=[entry for entry, _ in headers], counters={"rewarded": 4})) == 4
    learner = BatchInbox(broker, "new").acquire()
    assert learner.next(0) is not None
    learner.announce(Step(version=1))
    learner.set_address({"address": "tcp://here:1"})
    assert learner.release_before(1) == 1
    assert broker.payloads("payload", ["t9"]) == [None]
    relays.announce(broker, "here", "relay", {})
    broker.redis.config_set("maxmemory", 0)
    entry = broker.redis.xadd(broker.key("samples"), {"junk": b"x"})
    fill(broker)
    dead.bury(broker, "samples", "sampler", entry.decode(), dead.letter("samples", "junk", {}, "sampler"))
    assert len(dead.list_dead(broker)) == 1
    broker.finish()
    assert broker.finished()


def test_tasks_wait_until_memory_is_freed(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=4)
    assert (broker.memory().limit, broker.memory_is_short()) == (0, False)
    broker.redis.config_set("maxmemory", broker.redis.info("memory")["used_memory"] * 10 // 9)
    assert broker.memory_is_short()
    for _ in range(3):
        sampler.round()
    assert broker.counters().get("dispatched", 0) == 0
    broker.redis.config_set("maxmemory", 1 << 30)
    assert 0 < broker.memory().share < 0.5
    assert not broker.memory_is_short()
    drive(sampler, generator, learner)
    audited(broker, sampler.config)
