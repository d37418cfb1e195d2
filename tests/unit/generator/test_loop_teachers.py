"""A generator asks a teacher's server before it hands an episode in: with its scores, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from common.payload import Payload
from common.streams import dead
from common.streams.broker import Broker
from common.streams.tasks import TaskInbox
from generator.chat_api import ModelApi
from generator.teacher.server import TeacherServer
from tests.support.generator import Rig, evaluate, one
from tests.support.http_double import Double, Handler, fails, serve
from tests.support.teacher import Answer, by_id
from tests.support.waiting import until

pytestmark = pytest.mark.integration  # it listens on a port


@contextmanager
def taught(broker: Broker, *answers: Answer, source: str = "t") -> Iterator[tuple[Rig, Double]]:
    """A generator of a run whose teacher's server answers so, and is asked once a time."""
    with serve(*answers) as double:
        server = TeacherServer(ModelApi(f"{double.url}/v1", attempts=1), "large", 0)
        yield Rig(broker, teachers={source: server}, teacher={"url": f"{double.url}/v1"}), double


def stored(broker: Broker) -> list[Payload | None]:
    return broker.payloads("payload", ["t0", "t1", "t2"])


def test_each_training_episode_arrives_with_its_scores_and_no_other_is_scored(fake_broker: Broker) -> None:
    async def story(rig: Rig) -> Any:
        evaluate(rig, "e0", 2)
        rig.dispatch(3)
        return await rig.headers(5)

    with taught(fake_broker, by_id) as (rig, double):
        headers = rig.play(story)
    assert ([header.status for header in headers], len(double.requests)) == (["ok"] * 5, 3)
    for tokens in stored(fake_broker):
        assert tokens is not None
        assert tokens.teacher_logprobs.ravel().tolist() == [-float(one) for one in tokens.token_ids[tokens.mask()]]


@pytest.mark.parametrize(
    ("answers", "status", "requests"), [((fails(503), by_id), "ok", 2), ((fails(503),), "set_aside", 2)]
)
def test_an_attempt_without_scores_is_repeated_and_counts_once(
    fake_broker: Broker, answers: tuple[Answer, ...], status: str, requests: int
) -> None:
    with taught(fake_broker, *answers) as (rig, double):
        header = one(rig)
    assert (header.status, len(double.requests)) == (status, requests)
    assert header.model_tokens > 0
    if status == "ok":
        assert (rig.generator.metrics.failed, fake_broker.counters()["finished"]) == (1, 1)
        return
    assert header.reason.startswith("ChatUnavailable: ")
    assert stored(fake_broker) == [None] * 3
    ((_, letter),) = dead.list_dead(fake_broker)
    assert letter["stream"] == "tasks"


def holding(released: threading.Event) -> Callable[[Handler, Any], None]:
    def answer(handler: Handler, body: Any) -> None:
        released.wait()
        by_id(handler, body)

    return answer


def test_an_episode_that_waits_for_scores_leaves_its_slot_to_others(fake_broker: Broker) -> None:
    released = threading.Event()

    async def story(rig: Rig) -> Any:
        rig.dispatch(6)  # of which four may be under way
        await until(lambda: rig.engine.calls == 6)
        await until(lambda: sum(lease.awaits_scores for lease in rig.generator.leased) == 6)
        assert (rig.generator.slots_taken, rig.generator.room()) == (0, 4)
        released.set()
        return await rig.headers(6)

    with taught(fake_broker, holding(released)) as (rig, _):
        assert len(rig.play(story)) == 6


def test_a_stop_hands_back_what_waits_for_scores(fake_broker: Broker) -> None:
    released = threading.Event()

    async def story(rig: Rig) -> None:
        rig.dispatch(2)
        await until(lambda: sum(lease.awaits_scores for lease in rig.generator.leased) == 2)

    with taught(fake_broker, holding(released)) as (rig, _):
        try:
            rig.play(story)
        finally:
            released.set()
    deliveries = TaskInbox(fake_broker, "two").take(5, 0)
    assert sorted((one.task.task_id, one.attempt) for one in deliveries) == [("t0", 1), ("t1", 1)]
