"""The streams protocol, on fakeredis and on a real server alike."""

from __future__ import annotations

import dataclasses
import errno
import threading

import msgpack
import pytest
import structlog
from structlog.testing import capture_logs

from common.errors import UserError
from common.messages import Batch, Failure
from common.streams import dead
from common.streams.batches import CONSUMER, BatchInbox
from common.streams.broker import Broker
from common.streams.lease import RedisBehind
from common.streams.ledger import Commit, SamplerLedger
from common.streams.presence import LearnerWatch, Presence, learner_gone
from common.streams.tasks import CONSUMER_GROUP, Finished, TaskInbox
from tests.support.streams import dispatch, evaluate, finish_all, finished, leased, payload, silence


def batch(batch_id: int, *ids: str) -> Batch:
    n = len(ids)
    return Batch(batch_id=batch_id, sample_ids=list(ids), advantages=[0.5] * n, rewards=[1.0] * n, tokens=[10] * n)


def count_all(ledger: SamplerLedger, **changes: object) -> int:
    return ledger.commit(Commit(counted=[entry for entry, _ in ledger.read(block_ms=0)], **changes))  # type: ignore[arg-type]


def rewards(ledger: SamplerLedger) -> list[float | None]:
    return [header.reward for _, header in ledger.read(block_ms=0)]


def test_a_payload_stays_until_its_batch_is_released(broker: Broker, ledger: SamplerLedger) -> None:
    learner, (inbox, deliveries) = BatchInbox(broker).acquire(0), leased(ledger, 2)
    assert inbox.finish([finished(delivery, reward=0.25) for delivery in deliveries]) == 2
    assert rewards(ledger) == [0.25, 0.25]
    count_all(ledger, batches=[batch(0, "t0", "t1")])
    manifest = learner.next(0)
    assert manifest == batch(0, "t0", "t1")
    for stored in learner.payloads(manifest.sample_ids):
        assert stored is not None
        assert stored.token_ids.tolist() == payload().token_ids.tolist()
        assert stored.logprobs.tolist() == payload().logprobs.tolist()
    learner.release_before(1)
    assert learner.payloads(manifest.sample_ids) == [None, None]
    assert [broker.redis.xlen(broker.key(name)) for name in ("tasks", "samples", "batches")] == [0, 0, 0]


def test_a_task_finished_by_two_generators_counts_once(broker: Broker, ledger: SamplerLedger) -> None:
    slow, (delivery,) = leased(ledger, 1, "slow")
    quick = TaskInbox(broker, "quick")
    silence(broker, slow)
    (taken_over,) = quick.adopt(5)
    assert (delivery.attempt, taken_over.attempt) == (1, 2)
    assert quick.finish([finished(taken_over, reward=1.0)]) == 1
    assert slow.finish([finished(delivery, reward=0.0)]) == 0
    assert rewards(ledger) == [1.0]
    assert broker.counters()["finished_twice"] == 1


def test_a_repeated_finish_changes_nothing(broker: Broker, ledger: SamplerLedger) -> None:
    inbox, (first, second) = leased(ledger, 2)
    results = [finished(first, reward=1.0), finished(second, reward=1.0), finished(first, reward=0.0)]
    assert [inbox.finish(results) for _ in range(2)] == [2, 0]
    assert rewards(ledger) == [1.0, 1.0]
    assert broker.counters()["finished_twice"] == 4


def test_a_result_under_a_wrong_id_skips_the_leased_task(broker: Broker, ledger: SamplerLedger) -> None:
    inbox, (first, second) = leased(ledger, 2)
    assert inbox.finish([Finished(first.entry_id, finished(second).header, payload())]) == 1
    ((_, header),) = ledger.read(block_ms=0)
    assert (header.task_id, header.status) == (first.task.task_id, "set_aside")
    assert second.task.task_id in header.reason
    assert broker.payloads("payload", [second.task.task_id]) == [None]
    assert "names" in dead.list_dead(broker)[0][1]["reason"]


def test_giving_back_costs_no_attempt_and_failing_does(ledger: SamplerLedger) -> None:
    inbox, deliveries = leased(ledger, 1)
    assert (inbox.requeue(deliveries), inbox.requeue(deliveries)) == (1, 0), "not twice"
    (again,) = inbox.take(5, 0)
    assert again.attempt == 1
    inbox.requeue([dataclasses.replace(again, attempt=again.attempt + 1)])
    assert inbox.take(1, 0)[0].attempt == 2


def test_a_skipped_task_is_a_dead_letter_and_replayed_once(broker: Broker, ledger: SamplerLedger) -> None:
    inbox, (delivery,) = leased(ledger, 1)
    inbox.finish([inbox.set_aside(delivery, Failure.ENGINE_FAILED, "the engine failed")])
    ((_, header),) = ledger.read(block_ms=0)
    assert (header.status, header.failure, header.reason) == ("set_aside", Failure.ENGINE_FAILED, "the engine failed")
    count_all(ledger, outstanding_remove=["t0"])
    ((entry_id, letter),) = dead.list_dead(broker)
    assert letter["reason"] == "the engine failed"
    for other in ("t0", "", "-", "\udcff", entry_id.partition("-")[0], f"{2**64}-0", f"{entry_id}-0"):
        with pytest.raises(UserError, match=f"no dead letter {other} in run"):
            dead.replay(broker, other)
    assert dead.replay(broker, entry_id) == "tasks"
    with pytest.raises(UserError, match="no dead letter"):
        dead.replay(broker, entry_id)
    (again,) = inbox.take(5, 0)
    assert again.task == delivery.task
    inbox.finish([finished(again)])
    count_all(ledger)
    counters = broker.counters()
    assert counters["dispatched"] == counters["counted"] == 2


@pytest.mark.parametrize("garbage", [b"not msgpack \xc1", msgpack.packb({"v": 2})])
def test_unreadable_entries_go_to_the_dead_letters(broker: Broker, ledger: SamplerLedger, garbage: bytes) -> None:
    inbox, learner, key = TaskInbox(broker, "a"), BatchInbox(broker), broker.key
    broker.redis.xadd(key("tasks"), {"id": "t9", "task": garbage, "attempt": "1"})
    broker.redis.xadd(key("tasks"), {"nonsense": garbage})
    dispatch(ledger, 1)
    assert [delivery.task.task_id for delivery in inbox.take(5, 0)] == ["t0"]
    broker.redis.xadd(key("samples"), {"id": "t7", "header": garbage})
    broker.redis.xadd(key("samples"), {"junk": garbage})
    broker.redis.xadd(key("batches"), {"batch": garbage})
    assert learner.next(0) is None
    headers = ledger.read(block_ms=0)
    assert [(header.task_id, header.status) for _, header in headers] == [("t9", "set_aside"), ("t7", "set_aside")]
    letters = [letter["stream"] for _, letter in dead.list_dead(broker)]
    assert sorted(letters) == ["batches", "samples", "samples", "tasks", "tasks"]
    assert count_all(ledger) == 2
    assert ledger.read(block_ms=0) == []


def test_counting_acknowledges_and_writes_state_together(broker: Broker, ledger: SamplerLedger) -> None:
    finish_all(ledger, 2)
    headers = ledger.read(block_ms=0)
    successor = SamplerLedger(broker, "first")
    successor.acquire()
    assert successor.read(block_ms=0) == headers, "what was read and not committed is read again"
    rows = {f"p{i}": b"%d" % i for i in range(9001)}  # more than Lua can unpack at once
    commit = Commit(
        counted=[entry_id for entry_id, _ in headers],
        tracker=rows,
        open_add={"t0": b"sample"},
        outstanding_remove=["t0", "t1"],
        unlink=["t1"],
        counters={"late": 1},
        scalars={"batches": 0},
        evaluations={0: msgpack.packb({"version": 0, "accuracy": 0.5, "samples": 2})},
    )
    assert successor.commit(commit) == 2
    successor._sequence -= 1  # as if the reply had never come
    assert successor.commit(commit) == 2
    state = SamplerLedger(broker, "first").acquire()
    assert (state.tracker, state.open, state.outstanding) == (rows, {"t0": b"sample"}, {})
    assert state.scalars["batches"] == b"0"
    assert broker.evaluations() == [{"version": 0, "accuracy": 0.5, "samples": 2}]
    assert BatchInbox(broker).payloads(["t1"]) == [None]
    counters = broker.counters()
    assert [counters[name] for name in ("dispatched", "finished", "counted", "late")] == [2, 2, 2, 1]


def test_an_evaluation_has_one_version_and_withdraws_the_rest(broker: Broker, ledger: SamplerLedger) -> None:
    evaluate(ledger, 3, version=2)
    old, pinned, newer = (TaskInbox(broker, name) for name in ("old", "pinned", "newer"))
    assert old.lease(1, 5, 5) == ("", []), "its version is too old"
    name, deliveries = pinned.lease(2, 1, 5)
    assert (name, len(deliveries)) == ("e0", 1)
    assert newer.lease(3, 5, 5) == ("", []), "another version answers it"
    assert len(pinned.lease(2, 1, 5).deliveries) == 1
    assert pinned.finish([finished(delivery) for delivery in deliveries]) == 1
    count_all(ledger, closed=["e0"])
    counters = broker.counters()
    assert (counters["superseded"], counters["counted"], counters["dispatched"]) == (2, 3, 3)
    assert broker.keys_of("tasks:") == broker.keys_of("pin:") == []
    ledger.commit(Commit(closed=["e1"]))
    assert broker.counters()["superseded"] == 2


def test_a_version_that_redis_has_lost_answers_no_evaluation(broker: Broker, ledger: SamplerLedger) -> None:
    ledger.commit(Commit(scalars={"version": 2}))
    evaluate(ledger, 3, version=2)
    ahead, announced = (TaskInbox(broker, name) for name in ("ahead", "announced"))
    assert ahead.lease(5, 3, 5) == ("", [])
    assert announced.lease(2, 3, 5).evaluation == "e0"


def test_a_redis_that_lost_what_the_sampler_read_or_wrote_is_behind(broker: Broker, ledger: SamplerLedger) -> None:
    finish_all(ledger, 2)
    (kept, _), (lost, _) = ledger.read()
    before = broker.counters()
    # A server that took over without the second header: as far as it knows, its task was never finished.
    broker.redis.xack(broker.key("samples"), "sampler", lost)
    broker.redis.xdel(broker.key("samples"), lost)
    with pytest.raises(RedisBehind):
        ledger.commit(Commit(counted=[kept, lost], tracker={"p1": b"row"}, counters={"rewarded": 2}))
    assert broker.counters() == before
    assert broker.redis.hlen(broker.key("tracker")) == 0
    assert [entry_id for entry_id, _ in ledger.read()] == [kept], "it is read again, to be counted then"
    broker.redis.flushall()
    with pytest.raises(RedisBehind):
        ledger.read(block_ms=1)


def test_batches_come_in_order_until_they_are_released(broker: Broker, ledger: SamplerLedger) -> None:
    batches = [batch(i, f"t{i}") for i in range(3)]
    ledger.commit(Commit(batches=batches))
    inbox = BatchInbox(broker)
    assert [inbox.next(0), inbox.next(0)] == batches[:2]
    restarted = BatchInbox(broker).acquire(0)
    assert [restarted.next(0) for _ in range(4)] == [*batches, None]
    assert restarted.release_before(2) == 2
    assert [BatchInbox(broker).next(0)] == batches[2:]


def test_a_batch_whose_reply_was_lost_comes_before_newer_ones(broker: Broker, ledger: SamplerLedger) -> None:
    batches = [batch(i, f"t{i}") for i in range(2)]
    inbox = BatchInbox(broker)
    ledger.commit(Commit(batches=batches[:1]))
    broker.read_group("batches", "learner", CONSUMER, count=1)
    ledger.commit(Commit(batches=batches[1:]))
    assert [inbox.next(0), inbox.next(0)] == batches


def test_a_response_is_kept_for_drift_until_the_next_one(ledger: SamplerLedger) -> None:
    inbox, (delivery,) = leased(ledger, 1)
    inbox.finish([dataclasses.replace(finished(delivery), payload=payload(12), for_drift=True)])
    (previous, nothing) = inbox.previous(["p0", "p1"])
    assert previous is not None
    assert len(previous.token_ids) == 12
    assert nothing is None


def test_heartbeats_continue_after_one_without_descriptors(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    beats, beaten = 0, threading.Event()

    def usage() -> dict[str, float]:
        nonlocal beats
        beats += 1
        if beats == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        if beats > 2:
            beaten.set()
        return {}

    monkeypatch.setattr("common.streams.presence._usage", usage)
    with Presence(broker, "generator", "generator", interval=0.01):
        assert beaten.wait(20)


def test_a_learner_that_is_gone_is_said_ever_less_often(broker: Broker) -> None:
    broker.dead_after = 10.0
    learner, now, log = Presence(broker, "learner", "learner", interval=60.0), 0.0, structlog.get_logger()
    watch = LearnerWatch(broker, log, clock=lambda: now)

    def pass_time(seconds: float) -> list[str]:
        nonlocal now
        now += seconds
        broker.redis.zincrby(broker.key("alive"), -1000 * seconds, "learner")
        Presence(broker, "generator", "generator").beat()
        with capture_logs() as logs:
            watch.look()
        return [line["event"] for line in logs]

    assert learner_gone(broker) is None, "it has never been there"
    learner.start()
    learner.stop(withdraw=False)
    assert pass_time(9) == []
    assert learner_gone(broker) is None
    assert [bool(pass_time(11)) for _ in range(36)] == [n in (1, 4, 10, 22) for n in range(36)]
    assert learner_gone(broker) == pytest.approx(405, abs=5)
    now += 11
    learner.beat()
    assert pass_time(0) == ["the learner is back"]
    assert [bool(pass_time(11)) for _ in range(3)] == [False, False, True]


def test_generators_that_left_are_forgotten(broker: Broker, ledger: SamplerLedger) -> None:
    leaver, (delivery,) = leased(ledger, 1, "leaver")
    holder, _ = leased(ledger, 1, "holder")
    leaver.finish([finished(delivery)])
    leaver.leave()
    holder.leave()  # it still holds a task, so it must stay
    names = [info["name"] for info in broker.redis.xinfo_consumers(broker.key("tasks"), CONSUMER_GROUP)]
    assert names == [holder.consumer.encode()]
