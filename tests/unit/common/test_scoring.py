"""Finished episodes wait for their teacher, and each comes to the sampler once, with its scores."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest

from common.config import parse_config
from common.messages import Failure, SampleHeader
from common.streams import dead, scoring
from common.streams.broker import Broker
from common.streams.inbox import Delivery, Finished, Inbox
from common.streams.ledger import Commit, SamplerLedger
from common.streams.scoring import ScoringInbox
from tests.support.streams import Crew, dispatch, finished, leased, put_back, saved_keys, scored, silence, tasks

TEACHER = "maths"
ACTS = ["take", "take", "adopt", "finish", "finish", "requeue", "beat", "die", "save", "restore"]


@pytest.fixture
def crew(ledger: SamplerLedger) -> Crew:
    return Crew(ledger, TEACHER)


def headers(ledger: SamplerLedger) -> list[SampleHeader]:
    return [header for _, header in ledger.read(block_ms=0)]


def lengths(broker: Broker, *streams: str) -> list[int]:
    return [broker.redis.xlen(broker.key(name)) for name in streams]


def score(inbox: ScoringInbox, deliveries: list[Delivery], value: float = -0.5) -> int:
    """Score the payloads as they are stored."""
    payloads = inbox.payloads(deliveries)
    return inbox.finish([scored(d, tokens, value) for d, tokens in zip(deliveries, payloads, strict=True) if tokens])


def test_an_episode_comes_to_the_sampler_when_it_is_scored(broker: Broker, crew: Crew) -> None:
    inbox, deliveries = crew.leased(2, "teacher")
    assert headers(crew.ledger) == []
    assert score(inbox, deliveries) == 2
    assert [header.task_id for header in headers(crew.ledger)] == ["t0", "t1"]
    for tokens in broker.payloads("payload", ["t0", "t1"]):
        assert tokens is not None
        assert tokens.teacher_logprobs.tolist() == [[-0.5]] * len(tokens.logprobs)
    assert lengths(broker, "tasks", "scoring:maths", "samples") == [0, 0, 2]
    counters = broker.counters()
    assert (counters["to_teachers"], counters["finished"], counters["finished_twice"]) == (2, 2, 0)


def test_only_what_has_a_teacher_waits_for_one(broker: Broker, ledger: SamplerLedger) -> None:
    inbox, (first, second, third) = leased(ledger, 3)
    inbox.finish(
        [
            finished(first, teacher=TEACHER),
            finished(second),
            inbox.set_aside(third, Failure.TEACHER_FAILED, "it failed"),
        ]
    )
    assert [header.task_id for header in headers(ledger)] == ["t1", "t2"]
    assert [d.task.task_id for d in ScoringInbox(broker, "b", TEACHER).take(5, 0)] == ["t0"]


def test_the_first_to_score_wins_and_the_second_changes_nothing(broker: Broker, crew: Crew) -> None:
    slow, deliveries = crew.leased(1, "slow")
    quick = crew.inbox("quick")
    silence(broker, slow)
    taken_over = quick.adopt(5)
    assert [d.attempt for d in taken_over] == [2]
    assert score(quick, taken_over, -1.0) == 1
    assert score(slow, deliveries, -2.0) == 0
    assert slow.finish([slow.set_aside(deliveries[0], Failure.TEACHER_FAILED, "too late")]) == 0
    (tokens,) = broker.payloads("payload", ["t0"])
    assert tokens is not None
    assert set(tokens.teacher_logprobs.ravel().tolist()) == {-1.0}
    assert [header.status for header in headers(crew.ledger)] == ["ok"]
    assert dead.list_dead(broker) == []
    assert broker.counters()["finished_twice"] == 2


def test_what_is_given_back_keeps_its_header_and_counts_attempts(crew: Crew) -> None:
    inbox, (delivery,) = crew.leased(1, "teacher")
    assert inbox.requeue([dataclasses.replace(delivery, attempt=2)]) == 1
    (again,) = inbox.take(5, 0)
    assert (again.task, again.attempt) == (delivery.task, 2)
    assert inbox.requeue([again]) == 1
    assert inbox.take(5, 0)[0].attempt == 2


def test_an_episode_without_scores_is_set_aside_and_kept(broker: Broker, crew: Crew) -> None:
    inbox, (delivery,) = crew.leased(1, "teacher")
    inbox.finish([inbox.set_aside(delivery, Failure.TEACHER_FAILED, "the teacher is away")])
    (header,) = headers(crew.ledger)
    assert (header.task_id, header.status, header.reason) == ("t0", "set_aside", "the teacher is away")
    assert header.failure == Failure.TEACHER_FAILED
    ((letter, content),) = dead.list_dead(broker)
    assert content["stream"] == "scoring:maths"
    assert dead.replay(broker, letter) == "scoring:maths"
    assert inbox.take(5, 0)[0].task == delivery.task
    assert broker.counters()["dispatched"] == 2, "its result will be counted once more"


def test_unreadable_entries_of_a_teacher_are_dead_letters(broker: Broker, crew: Crew) -> None:
    inbox = crew.inbox("teacher")
    for entry in ({"id": "t9", "header": b"\xc1"}, {"junk": b"x"}):
        broker.redis.xadd(broker.key("scoring:maths"), entry)
    assert inbox.take(5, 0) == []
    assert [(header.task_id, header.status) for header in headers(crew.ledger)] == [("t9", "set_aside")]
    assert [letter["stream"] for _, letter in dead.list_dead(broker)] == ["scoring:maths"] * 2
    assert lengths(broker, "scoring:maths") == [0]


def test_a_reset_empties_the_streams_of_teachers_and_keeps_groups(broker: Broker, crew: Crew) -> None:
    inbox, (delivery,) = crew.leased(1, "teacher")
    crew.dispatch(1, start=1)
    crew.ledger.reset()
    assert lengths(broker, "scoring:maths") == [0]
    assert inbox.beat([delivery.entry_id]).lost == {delivery.entry_id}
    assert score(inbox, [delivery]) == 0
    crew.ledger.acquire()
    crew.dispatch(1, start=2)
    assert [d.task.task_id for d in inbox.take(5, 0)] == ["t2"]


def test_a_source_names_its_teacher_and_equal_teachers_are_one() -> None:
    sources: list[dict[str, Any]] = [
        {"path": "a", "name": "a"},
        {"path": "b", "name": "b", "teacher": {"url": "http://x/v1"}},
        {"path": "c", "name": "c", "teacher": {"model": None}},
        {"path": "d", "name": "d", "teacher": {"context": "{answer}"}},
        {"path": "e", "name": "e"},
    ]
    config = parse_config({"model": {"path": "m"}, "data": {"train": sources}, "teacher": {"model": "large"}})
    assert scoring.streams(config) == ["scoring:a", "scoring:b"]
    names = [scoring.teacher_of(config.for_source(source).teacher, config) for source in config.data.sources("train")]
    assert names == ["a", "b", "", "", "a"]


class Schedule:
    """Generators and teachers that do by chance whatever they may do, dying and a Redis restored to an older state too.

    Half of the tasks have a teacher. What a process knows it goes on knowing after others have taken its tasks over.
    """

    def __init__(self, broker: Broker, ledger: SamplerLedger, seed: int) -> None:
        self.broker, self.ledger, self.random = broker, ledger, random.Random(seed)
        self.held: dict[Inbox, list[Delivery]] = {}
        self.older: dict[bytes, bytes] = {}
        for _ in range(2):
            self.start("")
            self.start(TEACHER)

    def start(self, teacher: str) -> None:
        inbox = Crew(self.ledger, teacher).inbox(f"p{len(self.held)}")
        self.held[inbox] = []

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
            inbox.finish([self.result(delivery) for delivery in some])
        elif act == "requeue":
            inbox.requeue(some)
        elif act == "beat":
            inbox.beat([delivery.entry_id for delivery in held])
        elif act == "die":
            silence(self.broker, inbox)
            self.start(inbox.stage.stream.removeprefix("tasks").removeprefix("scoring:"))
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

    def result(self, delivery: Delivery) -> Finished:
        number = int(delivery.task.task_id[1:])
        if isinstance(delivery.task, SampleHeader):
            (tokens,) = self.broker.payloads("payload", [delivery.task.task_id])
            return scored(delivery, tokens or finished(delivery).payload, -float(number))  # type: ignore[arg-type]
        return finished(delivery, teacher=TEACHER if number % 2 else "")

    def end(self) -> None:
        """All die; new processes do the rest."""
        for inbox in self.held:
            silence(self.broker, inbox)
        for teacher in ("", TEACHER):
            inbox = Crew(self.ledger, teacher).inbox("last")
            while deliveries := inbox.adopt(100) + inbox.take(100, 0):
                inbox.finish([self.result(delivery) for delivery in deliveries])


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_each_episode_arrives_once_and_scored(fake_broker: Broker, seed: int) -> None:
    ledger = SamplerLedger(fake_broker, "first")
    ledger.acquire()
    dispatch(ledger, 10)
    schedule = Schedule(fake_broker, ledger, seed)
    for _ in range(80):
        schedule.step()
    schedule.end()
    arrived = ledger.read(block_ms=0)
    assert Counter(header.task_id for _, header in arrived) == Counter(task.task_id for task in tasks(10))
    assert {header.status for _, header in arrived} == {"ok"}
    for number, tokens in enumerate(fake_broker.payloads("payload", [f"t{i}" for i in range(10)])):
        assert tokens is not None
        assert set(tokens.teacher_logprobs.ravel().tolist()) == ({-float(number)} if number % 2 else set())
    assert lengths(fake_broker, "tasks", "scoring:maths") == [0, 0]
    ledger.commit(Commit(counted=[entry_id for entry_id, _ in arrived]))
    counters = fake_broker.counters()
    names = ("dispatched", "to_teachers", "finished", "counted")
    assert [counters[name] for name in names] == [10, 5, 10, 10]
