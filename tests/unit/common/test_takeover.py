"""Tasks of generators that died are taken over, and nobody else's."""

from __future__ import annotations

import pytest

from common.streams.broker import Broker
from common.streams.ledger import Commit, SamplerLedger
from common.streams.tasks import GROUP, TaskInbox
from tests.support.streams import dispatch, finished, leased, lose_reply, silence, tasks


def evaluate_one(ledger: SamplerLedger) -> None:
    """Begin an evaluation of one task, t5."""
    (task,) = tasks(1, 5)
    evaluation = Commit(dispatch=[(task.model_copy(update={"evaluation": "e0"}), b"memo")])
    evaluation.scalars |= {"evaluating": "e0", "evaluating_from": 0}
    ledger.commit(evaluation)


@pytest.mark.integration
def test_one_dead_task_behind_many_live_ones_is_found(real_broker: Broker) -> None:
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
    dying, _ = leased(ledger, 30, "dying")
    heir = TaskInbox(broker, "heir")
    silence(broker, dying)
    names = [delivery.task.task_id for _ in range(8) for delivery in heir.adopt(4)]
    assert sorted(names) == sorted(f"t{i}" for i in range(30))
    silence(broker, heir)
    again = [delivery.task.task_id for _ in range(8) for delivery in TaskInbox(broker, "next").adopt(4)]
    assert sorted(again) == sorted(names)


def test_a_task_taken_over_cannot_be_given_back(broker: Broker, ledger: SamplerLedger) -> None:
    slow, deliveries = leased(ledger, 1, "slow")
    quick = TaskInbox(broker, "quick")
    silence(broker, slow)
    (taken_over,) = quick.adopt(1)
    assert slow.requeue(deliveries) == 0
    assert quick.beat([taken_over.entry_id]).lost == set(), "it is still the heir's"
    assert quick.finish([finished(taken_over)]) == 1


def test_a_task_lost_in_a_reply_is_leased_once_more(broker: Broker, ledger: SamplerLedger) -> None:
    dispatch(ledger, 3)
    generator, other = TaskInbox(broker, "unlucky"), TaskInbox(broker, "other")
    lose_reply(broker, generator.consumer)
    (known,) = generator.take(1, 0)
    generator.beat([known.entry_id])
    lose_reply(broker, generator.consumer, seconds=0)
    assert other.adopt(5) == []
    (again,) = generator.adopt(5)
    assert (again.task.task_id, again.attempt) == ("t0", 2)
    assert generator.adopt(5) == [], "what came just now may still be on its way"
    assert generator.finish([finished(known), finished(again)]) == 2


def test_a_restarted_generator_does_not_hold_the_old_tasks(broker: Broker, ledger: SamplerLedger) -> None:
    before, _ = leased(ledger, 2, "same")
    silence(broker, before)
    TaskInbox(broker, "same").beat([])
    assert [delivery.attempt for delivery in TaskInbox(broker, "other").adopt(5)] == [2, 2]


def test_a_generator_that_was_cut_off_takes_nothing_over(
    broker: Broker, ledger: SamplerLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch(ledger, 2)
    now = [1000.0]
    monkeypatch.setattr("common.streams.tasks.time.monotonic", lambda: now[0])
    other, back = TaskInbox(broker, "other"), TaskInbox(broker, "back")
    other.take(2, 0)
    back.beat([])
    now[0] += 1.5 * broker.dead_after  # Redis was away for all of them
    silence(broker, other, 1.5 * broker.dead_after)
    assert back.adopt(5) == []
    back.beat([])
    assert back.adopt(5) == []
    for _ in range(5):
        now[0] += broker.dead_after / 4
        back.beat([])
    back.adopt(5)  # Redis' own clock has not moved in this test: it looks as if it had been set
    silence(broker, other, 1.5 * broker.dead_after)
    assert len(back.adopt(5)) == 2, "the other has not come back"


def test_a_sampler_that_was_cut_off_keeps_an_evaluation(
    broker: Broker, ledger: SamplerLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("common.streams.ledger.time.monotonic", lambda: now[0])
    evaluate_one(ledger)
    generator = TaskInbox(broker, "pinned")
    generator.lease(3, 1, 0)

    def unseen_after(seconds: float) -> float:
        now[0] += seconds
        pin = ledger.pin("e0")
        assert pin is not None
        assert pin.version == 3
        return pin.unseen

    look = broker.dead_after / 4
    assert unseen_after(0.0) == 0
    assert unseen_after(look) == look
    assert unseen_after(1.5 * broker.dead_after) == 0, "Redis was away for the generator too"
    assert [unseen_after(look) for _ in range(4)] == [look, 2 * look, 3 * look, 4 * look], "it does not come back"
    generator.lease(3, 1, 0)
    assert unseen_after(look) == 0


def test_a_leaving_generator_gives_up_tasks_of_an_evaluation(broker: Broker, ledger: SamplerLedger) -> None:
    evaluate_one(ledger)
    leaver, heir = TaskInbox(broker, "leaver"), TaskInbox(broker, "heir")
    leaver.lease(0, 1, 0)  # the reply is lost
    leaver.leave()
    silence(broker, leaver)
    assert [delivery.task.task_id for delivery in heir.adopt(5, "e0")] == ["t5"]


def test_a_lease_makes_a_forgotten_generator_known_again(broker: Broker, ledger: SamplerLedger) -> None:
    dispatch(ledger, 2)
    cut_off, heir = TaskInbox(broker, "cut off"), TaskInbox(broker, "heir")
    (first,) = cut_off.lease(-1, 1, 1).deliveries
    broker.redis.delete(broker.key("holders"))
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
    assert broker.redis.zscore(broker.key("holders"), frozen.consumer) is None
    assert broker.redis.hgetall(broker.key("takeovers")) == {}
    assert [info["name"] for info in broker.redis.xinfo_consumers(broker.key("tasks"), GROUP)] == [
        heir.consumer.encode()
    ]
    frozen.lease(-1, 0, 0)
    assert frozen.beat(ids).lost == ids


def test_a_dead_generator_with_an_evaluations_task_is_known(broker: Broker, ledger: SamplerLedger) -> None:
    evaluate_one(ledger)
    dying, heir = TaskInbox(broker, "dying"), TaskInbox(broker, "heir")
    assert len(dying.lease(0, 1, 0).deliveries) == 1
    silence(broker, dying, seconds=10_000)
    assert heir.adopt(5) == []
    assert [delivery.task.task_id for delivery in heir.adopt(5, "e0")] == ["t5"]


def test_tasks_leased_during_a_heartbeat_are_checked_next_time(
    broker: Broker, ledger: SamplerLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_heartbeats_as_rare_as_they_may_be_are_no_outage(
    broker: Broker, ledger: SamplerLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch(ledger, 1)
    dying, heir = TaskInbox(broker, "dying"), TaskInbox(broker, "heir")
    dying.take(1, 0)
    now = [1000.0]
    monkeypatch.setattr("common.streams.tasks.time.monotonic", lambda: now[0])
    for _ in range(3):
        heir.beat([])
        now[0] += 0.51 * broker.dead_after
    heir.adopt(5)  # Redis' own clock has not moved in this test: it looks as if it had been set
    silence(broker, dying)
    assert len(heir.adopt(5)) == 1
