"""The teacher's process: it scores what it leases, and what it cannot score is set aside, never lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from common.messages import Failure
from common.payload import Payload, encode_payload
from common.streams import dead
from common.streams.broker import Broker
from generator.engine.engine import EngineDied
from generator.teacher.scores import Scores
from tests.support.streams import payload, silence
from tests.support.teacher import TeacherRig, constant
from tests.support.waiting import until


def stored(broker: Broker, number: int = 0) -> Payload:
    (tokens,) = broker.payloads("payload", [f"t{number}"])
    assert tokens is not None
    return tokens


@pytest.mark.parametrize("top_k", [0, 3])
def test_each_episode_gets_the_scores_of_its_model_tokens(fake_broker: Broker, top_k: int) -> None:
    rig = TeacherRig(fake_broker, top_k=top_k, form="loss")
    rig.crew.dispatch(10)
    headers = rig.play(lambda rig: rig.headers(10))
    assert {(header.status, header.reward) for header in headers} == {("ok", 1.0)}
    assert rig.scorer.calls == [10] * 10
    for number in range(10):
        tokens = stored(fake_broker, number)
        assert tokens.teacher_logprobs.tolist() == [[-0.5] * max(1, top_k)] * 6
        assert tokens.teacher_ids.tolist() == ([[0, 1, 2]] * 6 if top_k else [])
        assert tokens.logprobs.tolist() == payload().logprobs.tolist()
    status = rig.metrics.work_status(0, 4)["metrics"]
    assert (status["teacher/samples"], status["teacher/tokens"], status["teacher/failed"]) == (10, 60, 0)


def test_rows_are_scored_apart_and_only_as_far_as_the_model_spoke(fake_broker: Broker) -> None:
    rig = TeacherRig(fake_broker)
    rig.crew.dispatch(1)
    tokens = Payload(
        np.arange(20, dtype=np.int32),
        np.array([[2, 4], [13, 15], [16, 18]], np.int32),
        np.full(6, -1.0, np.float32),
        np.array([[0, 0, 6]], np.int32),
        np.array([6, 4, 10], np.int32),
    )
    fake_broker.redis.set(fake_broker.key("payload:t0"), encode_payload(tokens))
    rig.scorer.answer = lambda ids, top_k: Scores(-ids[:, None].astype(np.float32), np.empty((len(ids), 0), np.int32))
    rig.play(lambda rig: rig.headers(1))
    assert rig.scorer.calls == [4, 8]
    assert stored(fake_broker).teacher_logprobs.ravel().tolist() == [-2, -3, -13, -14, -16, -17]


def test_an_episode_in_which_the_model_said_nothing_passes(fake_broker: Broker) -> None:
    rig = TeacherRig(fake_broker)
    rig.crew.dispatch(1)
    silent = Payload(np.arange(4, dtype=np.int32), *(np.empty(shape, np.int32) for shape in ((0, 2), 0, (0, 3))))
    fake_broker.redis.set(fake_broker.key("payload:t0"), encode_payload(silent))
    (header,) = rig.play(lambda rig: rig.headers(1))
    assert (header.status, rig.scorer.calls) == ("ok", [])


def raises(error: Exception) -> Callable[[np.ndarray, int], Scores]:
    def answer(token_ids: np.ndarray, top_k: int) -> Scores:
        raise error

    return answer


def changed(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray, int], Scores]:
    def answer(token_ids: np.ndarray, top_k: int) -> Scores:
        scores = constant(token_ids, top_k)
        return scores._replace(logprobs=change(scores.logprobs))

    return answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (raises(ConnectionError("away")), "ConnectionError: away"),
        (changed(lambda scores: scores * np.nan), "InvalidMessage: Payload: a teacher's log-probs are not finite"),
        (changed(lambda scores: scores + 7), "InvalidMessage: Payload: a teacher's log-probs from 6.5 to 6.5"),
        (changed(lambda scores: scores[1:]), "WrongScores: the teacher scored 9 tokens with 1 numbers each; 10 with 1"),
        (changed(lambda scores: np.hstack([scores, scores])), "WrongScores: the teacher scored 10 tokens with 2"),
    ],
)
def test_an_episode_without_usable_scores_is_set_aside(fake_broker: Broker, answer: Any, reason: str) -> None:
    rig = TeacherRig(fake_broker)
    rig.scorer.answer = answer
    header = rig.one()
    assert header.status == "set_aside"
    assert header.reason.startswith(reason)
    assert len(rig.scorer.calls) == 2, "generator.max_attempts"
    assert len(stored(fake_broker).teacher_logprobs) == 0
    ((_, letter),) = dead.list_dead(fake_broker)
    assert letter["stream"] == rig.inbox.stage.stream


def test_a_failed_attempt_is_repeated_and_counts_once(fake_broker: Broker) -> None:
    rig = TeacherRig(fake_broker)
    answers = [raises(ConnectionError("away")), constant]
    rig.scorer.answer = lambda token_ids, top_k: answers.pop(0)(token_ids, top_k)
    assert rig.one().status == "ok"
    assert fake_broker.redis.xlen(fake_broker.key("samples")) == 1
    assert rig.metrics.failed == 1


@pytest.mark.parametrize("tokens", [b"", b"rubbish"])
def test_an_episode_without_its_tokens_is_set_aside(fake_broker: Broker, tokens: bytes) -> None:
    rig = TeacherRig(fake_broker)
    rig.crew.dispatch(1)
    fake_broker.redis.set(fake_broker.key("payload:t0"), tokens)
    (header,) = rig.play(lambda rig: rig.headers(1))
    assert (header.failure, header.reason) == (
        Failure.TEACHER_FAILED,
        "TokensLost: its tokens are missing or invalid",
    )


def test_a_stop_hands_back_what_is_not_scored(fake_broker: Broker) -> None:
    rig = TeacherRig(fake_broker)
    rig.crew.dispatch(6)

    async def stop_in_the_middle(rig: TeacherRig) -> None:
        rig.scorer.hold.clear()
        await until(lambda: len(rig.scorer.calls) == 4)

    rig.play(stop_in_the_middle)
    assert rig.ledger.arrived() == 0
    deliveries = rig.crew.inbox("two").take(10, 0)
    assert sorted((d.task.task_id, d.attempt) for d in deliveries) == [(f"t{i}", 1) for i in range(6)]


def test_a_dead_scorer_ends_the_process_and_hands_back(fake_broker: Broker) -> None:
    rig = TeacherRig(fake_broker)
    rig.crew.dispatch(3)

    async def die(rig: TeacherRig) -> None:
        rig.scorer.hold.clear()
        await until(lambda: len(rig.scorer.calls) == 3)
        rig.scorer.died = True
        await until(lambda: not rig.process.leased)

    with pytest.raises(EngineDied):
        rig.play(die)
    assert len(rig.crew.inbox("two").take(10, 0)) == 3


def test_a_killed_teachers_episodes_are_taken_over(fake_broker: Broker) -> None:
    rig = TeacherRig(fake_broker)
    killed, deliveries = rig.crew.leased(3, "killed")
    silence(fake_broker, killed)
    headers = rig.play(lambda rig: rig.headers(3))
    assert sorted(header.task_id for header in headers) == ["t0", "t1", "t2"]
    assert killed.beat([d.entry_id for d in deliveries]).lost == {d.entry_id for d in deliveries}


def test_what_killed_every_teacher_before_is_given_up(fake_broker: Broker) -> None:
    rig = TeacherRig(fake_broker)
    other, (delivery,) = rig.crew.leased(1, "other")
    other.requeue([dataclasses.replace(delivery, attempt=3)])
    (header,) = rig.play(lambda rig: rig.headers(1))
    assert header.failure == Failure.GENERATORS_LOST
    assert header.reason == "given up after 2 attempts: the teachers died or hung"
    assert rig.scorer.calls == []


def test_the_process_ends_with_the_run(fake_broker: Broker) -> None:
    rig = TeacherRig(fake_broker)

    async def end(rig: TeacherRig) -> None:
        fake_broker.finish()
        await until(rig.process.stop.is_set)

    rig.play(end)
