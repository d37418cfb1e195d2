"""The streams protocol, on fakeredis and on a real server alike."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest
import structlog
from structlog.testing import capture_logs

from common.messages import Batch, Step
from common.streams import dead
from common.streams.batches import BatchInbox, StepReader, latest
from common.streams.broker import Broker
from common.streams.lease import LeaseLost
from common.streams.ledger import Commit, OutOfStep, SamplerLedger
from common.streams.presence import LearnerWatch, Presence, learner_gone
from common.streams.tasks import GROUP, Finished, TaskInbox
from tests.support.streams import dispatch, finish_all, finished, leased, payload, silence, tasks


def batch(batch_id: int, ids: list[str]) -> Batch:
    n = len(ids)
    return Batch(batch_id=batch_id, sample_ids=ids, advantages=[0.5] * n, rewards=[1.0] * n, tokens=[10] * n)


def test_each_task_goes_to_one_generator(broker: Broker, ledger: SamplerLedger) -> None:
    dispatch(ledger, 10)
    first, second = TaskInbox(broker, "a"), TaskInbox(broker, "b")
    taken = first.take(6, 0) + second.take(6, 0)
    assert sorted(delivery.task.task_id for delivery in taken) == sorted(task.task_id for task in tasks(10))


def test_a_finished_task_leaves_a_header_and_its_payload(broker: Broker, ledger: SamplerLedger) -> None:
    inbox, (delivery,) = leased(ledger, 1)
    assert inbox.finish([finished(delivery, reward=0.25)]) == 1
    ((_, header),) = ledger.read(block_ms=0)
    assert (header.task_id, header.reward) == ("t0", 0.25)
    (stored,) = BatchInbox(broker).payloads(["t0"])
    assert stored is not None
    assert stored.token_ids.tolist() == payload().token_ids.tolist()
    assert stored.logprobs.tolist() == payload().logprobs.tolist()
    assert broker.redis.xlen(broker.key("tasks")) == 0


def test_a_task_finished_by_two_generators_counts_once(broker: Broker, ledger: SamplerLedger) -> None:
    slow, (delivery,) = leased(ledger, 1, "slow")
    quick = TaskInbox(broker, "quick")
    silence(broker, slow)
    (taken_over,) = quick.adopt(5)
    assert (delivery.attempt, taken_over.attempt) == (1, 2)
    assert quick.finish([finished(taken_over, reward=1.0)]) == 1
    assert slow.finish([finished(delivery, reward=0.0)]) == 0
    assert [header.reward for _, header in ledger.read(block_ms=0)] == [1.0]
    assert broker.counters()["finished_twice"] == 1


def test_a_repeated_finish_changes_nothing(broker: Broker, ledger: SamplerLedger) -> None:
    inbox, deliveries = leased(ledger, 3)
    results = [finished(delivery) for delivery in deliveries]
    assert (inbox.finish(results), inbox.finish(results)) == (3, 0)
    assert len(ledger.read(block_ms=0)) == 3


def test_a_task_that_is_finished_twice_in_one_call_counts_once(broker: Broker, ledger: SamplerLedger) -> None:
    inbox, (first, second) = leased(ledger, 2)
    results = [finished(first, reward=1.0), finished(second, reward=1.0), finished(first, reward=0.0)]
    assert inbox.finish(results) == 2
    assert [header.reward for _, header in ledger.read(block_ms=0)] == [1.0, 1.0]
    assert broker.counters()["finished_twice"] == 1


def test_tasks_of_a_generator_that_beats_are_not_taken_over(broker: Broker, ledger: SamplerLedger) -> None:
    alive, deliveries = leased(ledger, 2, "alive")
    silence(broker, alive)
    assert alive.beat([delivery.entry_id for delivery in deliveries]).lost == set()
    assert TaskInbox(broker, "other").adopt(5) == []


def test_a_generator_that_wakes_up_learns_what_it_has_lost(broker: Broker, ledger: SamplerLedger) -> None:
    stopped, deliveries = leased(ledger, 3, "stopped")
    other, ids = TaskInbox(broker, "other"), {delivery.entry_id for delivery in deliveries}
    assert stopped.beat(ids).lost == set()
    silence(broker, stopped)
    taken = {delivery.entry_id for delivery in other.adopt(2)}
    assert stopped.beat(ids).lost == taken
    assert stopped.beat(ids - taken).lost == set()
    assert other.beat(taken).lost == set()


def test_handing_back_costs_no_attempt_and_failing_does(broker: Broker, ledger: SamplerLedger) -> None:
    inbox, deliveries = leased(ledger, 1)
    inbox.requeue(deliveries)
    (again,) = inbox.take(1, 0)
    assert again.attempt == 1
    inbox.requeue([dataclasses.replace(again, attempt=again.attempt + 1)])
    assert inbox.take(1, 0)[0].attempt == 2


def test_a_task_given_back_cannot_be_given_back_twice(broker: Broker, ledger: SamplerLedger) -> None:
    inbox, taken = leased(ledger, 1)
    assert (inbox.requeue(taken), inbox.requeue(taken)) == (1, 0)
    assert len(inbox.take(5, 0)) == 1


def test_a_skipped_task_is_a_header_and_a_dead_letter(broker: Broker, ledger: SamplerLedger) -> None:
    inbox, (delivery,) = leased(ledger, 1)
    inbox.finish([inbox.set_aside(delivery, "the engine failed")])
    ((_, header),) = ledger.read(block_ms=0)
    assert (header.status, header.reason) == ("set_aside", "the engine failed")
    ((entry_id, letter),) = dead.list_dead(broker)
    assert letter["reason"] == "the engine failed"
    assert dead.replay(broker, entry_id) == "tasks"
    assert inbox.take(1, 0)[0].task == delivery.task
    assert dead.list_dead(broker) == []


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x80\x04K\x01.", b"not msgpack \xc1", msgpack.packb({"v": 2}), msgpack.packb([1, 2]), b"\x93" * 5000],
)
def test_an_unreadable_task_is_set_aside_and_stops_no_process(
    broker: Broker, ledger: SamplerLedger, garbage: bytes
) -> None:
    inbox = TaskInbox(broker, "a")
    broker.redis.xadd(broker.key("tasks"), {"id": "t9", "task": garbage, "attempt": "1"})
    broker.redis.xadd(broker.key("tasks"), {"nonsense": garbage or b"x"})
    dispatch(ledger, 1)
    assert [delivery.task.task_id for delivery in inbox.take(5, 0)] == ["t0"]
    assert [(header.task_id, header.status) for _, header in ledger.read(block_ms=0)] == [("t9", "set_aside")]
    assert len(dead.list_dead(broker)) == 2


def test_an_unreadable_header_is_set_aside_under_its_task(broker: Broker, ledger: SamplerLedger) -> None:
    broker.redis.xadd(broker.key("samples"), {"id": "t7", "header": b"\xc1"})
    broker.redis.xadd(broker.key("samples"), {"junk": b"\xc1"})
    headers = ledger.read(block_ms=0)
    assert [(header.task_id, header.status) for _, header in headers] == [("t7", "set_aside")]
    assert len(dead.list_dead(broker)) == 2
    assert ledger.commit(Commit(counted=[entry_id for entry_id, _ in headers])) == 1
    assert ledger.read(block_ms=0) == []


def test_an_unreadable_batch_goes_to_the_dead_letters(broker: Broker) -> None:
    inbox = BatchInbox(broker)
    broker.redis.xadd(broker.key("batches"), {"batch": msgpack.packb({"v": 1, "batch_id": -1})})
    assert inbox.next(0) is None
    ((_, letter),) = dead.list_dead(broker)
    assert "batch_id" in letter["reason"]


def test_an_entry_whose_burial_is_repeated_is_one_dead_letter(broker: Broker) -> None:
    inbox = BatchInbox(broker)
    entry = broker.redis.xadd(broker.key("batches"), {"batch": b"junk"}).decode()
    assert inbox.next(0) is None
    dead.bury(broker, "batches", "learner", entry, dead.letter("batches", "junk", {}, "learner"))
    assert len(dead.list_dead(broker)) == 1
    assert broker.counters()["dead"] == 1


def test_counting_acknowledges_and_writes_state_together(broker: Broker, ledger: SamplerLedger) -> None:
    finish_all(ledger, 2)
    headers = ledger.read(block_ms=0)
    commit = Commit(
        counted=[entry_id for entry_id, _ in headers],
        tracker={"p0": b"row"},
        open_add={"t0": b"sample"},
        outstanding_remove=["t0", "t1"],
        unlink=["t1"],
        counters={"late": 1},
        scalars={"batches": 0},
        evaluations={0: msgpack.packb({"version": 0, "accuracy": 0.5, "samples": 2})},
    )
    assert ledger.commit(commit) == 2
    state = SamplerLedger(broker, "first").acquire()
    assert state.tracker == {"p0": b"row"}
    assert state.open == {"t0": b"sample"}
    assert state.outstanding == {}
    assert state.scalars["batches"] == b"0"
    assert broker.evaluations() == [{"version": 0, "accuracy": 0.5, "samples": 2}]
    assert BatchInbox(broker).payloads(["t1"]) == [None]
    counters = broker.counters()
    assert (counters["dispatched"], counters["finished"], counters["counted"], counters["late"]) == (2, 2, 2, 1)


def test_headers_read_but_not_committed_are_read_again(broker: Broker, ledger: SamplerLedger) -> None:
    finish_all(ledger, 2)
    before = ledger.read(block_ms=0)
    successor = SamplerLedger(broker, "first")
    successor.acquire()
    assert successor.read(block_ms=0) == before


def test_a_commit_whose_reply_was_lost_is_not_applied_twice(broker: Broker, ledger: SamplerLedger) -> None:
    commit = Commit(dispatch=[(task, b"") for task in tasks(3)], counters={"late": 1})
    ledger.commit(commit)
    ledger._sequence -= 1  # as if the reply had never come
    ledger.commit(commit)
    assert broker.redis.xlen(broker.key("tasks")) == 3
    assert broker.counters()["late"] == 1


def test_a_second_sampler_is_refused_while_the_first_lives(broker: Broker, ledger: SamplerLedger) -> None:
    with pytest.raises(LeaseLost, match="already has a sampler"):
        SamplerLedger(broker, "second").acquire(wait=0)


def test_a_replaced_sampler_cannot_write(broker: Broker, ledger: SamplerLedger) -> None:
    broker.redis.delete(broker.key("lease"))
    successor = SamplerLedger(broker, "second")
    successor.acquire()
    with pytest.raises(LeaseLost):
        ledger.commit(Commit(counters={"late": 1}))
    assert "late" not in broker.counters()
    successor.commit(Commit(counters={"late": 1}))
    broker.redis.delete(broker.key("lease"))
    with pytest.raises(OutOfStep):
        ledger.commit(Commit(counters={"late": 1}))
    assert broker.counters()["late"] == 1


def test_a_sampler_whose_redis_was_emptied_is_out_of_step(broker: Broker, ledger: SamplerLedger) -> None:
    dispatch(ledger, 2)
    broker.redis.flushall()
    with pytest.raises(OutOfStep):
        ledger.read(block_ms=1)


def test_a_header_that_redis_lost_after_it_was_read_is_not_counted(broker: Broker, ledger: SamplerLedger) -> None:
    finish_all(ledger, 2)
    (kept, _), (lost, _) = ledger.read()
    before = broker.counters()
    # A server that took over without them: as far as it knows, the second was never finished.
    broker.redis.xack(broker.key("samples"), "sampler", lost)
    broker.redis.xdel(broker.key("samples"), lost)
    with pytest.raises(OutOfStep):
        ledger.commit(Commit(counted=[kept, lost], tracker={"p1": b"row"}, counters={"rewarded": 2}))
    assert broker.counters() == before
    assert broker.redis.hlen(broker.key("tracker")) == 0
    assert [entry_id for entry_id, _ in ledger.read()] == [kept], "it is read again, to be counted then"


@pytest.mark.integration
def test_a_sampler_that_died_on_this_host_is_replaced_at_once(broker: Broker) -> None:
    import socket
    import subprocess
    import sys

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    SamplerLedger(broker, f"{socket.gethostname()}/{gone.pid}/x").acquire()
    SamplerLedger(broker, "heir").acquire(wait=0)
    assert broker.redis.get(broker.key("lease")) == b"heir"


def test_more_entries_than_lua_can_unpack_at_once_are_committed(broker: Broker, ledger: SamplerLedger) -> None:
    rows = {f"p{i}": b"%d" % i for i in range(9001)}
    ledger.commit(Commit(tracker=rows))
    assert SamplerLedger(broker, "first").acquire().tracker == rows


def test_batches_come_in_order_until_they_are_released(broker: Broker, ledger: SamplerLedger) -> None:
    batches = [batch(i, [f"t{i}"]) for i in range(3)]
    ledger.commit(Commit(batches=batches))
    inbox = BatchInbox(broker)
    assert [inbox.next(0), inbox.next(0)] == batches[:2]
    restarted = BatchInbox(broker).acquire(0)
    assert [restarted.next(0) for _ in range(4)] == [*batches, None]
    assert restarted.release_before(2) == 2
    assert [BatchInbox(broker).next(0)] == batches[2:]


def test_releasing_frees_payloads(broker: Broker, ledger: SamplerLedger) -> None:
    inbox = BatchInbox(broker).acquire(0)
    finish_all(ledger, 2)
    headers = ledger.read(block_ms=0)
    ledger.commit(Commit(counted=[entry for entry, _ in headers], batches=[batch(0, ["t0", "t1"])]))
    manifest = inbox.next(0)
    assert manifest is not None
    assert None not in inbox.payloads(manifest.sample_ids)
    inbox.release_before(1)
    assert inbox.payloads(manifest.sample_ids) == [None, None]
    assert [broker.redis.xlen(broker.key(name)) for name in ("tasks", "samples", "batches")] == [0, 0, 0]


def test_a_response_is_kept_for_drift_until_the_next_one(broker: Broker, ledger: SamplerLedger) -> None:
    inbox, (delivery,) = leased(ledger, 1)
    result = finished(delivery)
    inbox.finish([type(result)(result.entry_id, result.header, payload(12), keep=True)])
    (previous, nothing) = inbox.previous(["p0", "p1"])
    assert previous is not None
    assert len(previous.token_ids) == 12
    assert nothing is None


def test_steps_are_read_in_order_from_where_a_reader_stopped(broker: Broker) -> None:
    inbox = BatchInbox(broker).acquire()
    steps = [Step(version=v, drift=0.1 * v) for v in range(4)]
    for step in steps[:2]:
        inbox.announce(step)
    reader = StepReader(broker)
    assert reader.read() == steps[:2]
    broker.redis.xadd(broker.key("steps"), {"step": b"junk"})
    for step in steps[2:]:
        inbox.announce(step)
    assert StepReader(broker, after=reader.last).read() == steps[2:]
    assert latest(broker) == steps[-1]


def test_processes_are_listed_while_they_live(broker: Broker) -> None:
    with Presence(broker, "g1", "generator", interval=60.0) as presence:
        presence.status(state="running")
        presence.beat()
        assert broker.processes()["g1"]["state"] == "running"
        broker.dead_after, alive = -1.0, broker.dead_after
        assert broker.processes() == {}
    broker.dead_after = alive
    assert broker.processes() == {}


def test_processes_that_were_killed_are_forgotten(broker: Broker) -> None:
    for name in ("killed", "alive"):
        Presence(broker, name, "generator").beat()
    broker.redis.zincrby(broker.key("alive"), -11_000 * broker.dead_after, "killed")
    Presence(broker, "alive", "generator").beat()
    assert broker.redis.hkeys(broker.key("processes")) == [b"alive"]
    assert broker.redis.zrange(broker.key("alive"), 0, -1) == [b"alive"]


@pytest.mark.parametrize("killed", [True, False])
def test_a_learner_that_is_gone_is_said_ever_less_often(broker: Broker, killed: bool) -> None:
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
    learner.stop(withdraw=not killed)
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
    names = [info["name"] for info in broker.redis.xinfo_consumers(broker.key("tasks"), GROUP)]
    assert names == [holder.consumer.encode()]


def test_a_result_under_a_wrong_id_skips_the_leased_task(broker: Broker, ledger: SamplerLedger) -> None:
    inbox, (first, second) = leased(ledger, 2)
    wrong = finished(second)
    assert inbox.finish([Finished(first.entry_id, wrong.header, payload())]) == 1
    ((_, header),) = ledger.read(block_ms=0)
    assert (header.task_id, header.status) == (first.task.task_id, "set_aside")
    assert second.task.task_id in header.reason
    assert broker.payloads("payload", [second.task.task_id]) == [None]
    assert "names" in dead.list_dead(broker)[0][1]["reason"]


def test_a_dead_letter_is_replayed_once_and_counted_again(broker: Broker, ledger: SamplerLedger) -> None:
    inbox, (delivery,) = leased(ledger, 1)
    inbox.finish([inbox.set_aside(delivery, "the engine failed")])
    ledger.commit(Commit(counted=[entry for entry, _ in ledger.read(block_ms=0)], outstanding_remove=["t0"]))
    ((letter, _),) = dead.list_dead(broker)
    dead.replay(broker, letter)
    with pytest.raises(Exception, match="no dead letter"):
        dead.replay(broker, letter)
    inbox.finish([finished(delivery) for delivery in inbox.take(5, 0)])
    ledger.commit(Commit(counted=[entry for entry, _ in ledger.read(block_ms=0)]))
    counters = broker.counters()
    assert counters["dispatched"] == counters["counted"] == 2
