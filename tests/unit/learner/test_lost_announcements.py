"""A Redis that has gone back in time: what the learner had told is told again, whatever it waits for."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace

import pytest
import structlog

from common.messages import Step
from common.streams.batches import BatchInbox, StepReader
from common.streams.broker import Broker
from learner.loop import Learner
from learner.publishing import Publisher

# A learner that has started says so without metrics.
MADE: dict[int, dict[str, float]] = {1: {}, 2: {"reward/mean": float("nan")}, 3: {"reward/mean": 0.5}}
ENDPOINT = {"address": "tcp://127.0.0.1:5555"}


@pytest.fixture
def learner(fake_broker: Broker) -> Learner:
    """One that began with version 1, has told of versions 2 and 3 and serves the last; it leaves when asked to stop."""
    made = object.__new__(Learner)
    made.broker, made.inbox, made.presence = fake_broker, BatchInbox(fake_broker).acquire(), None
    made.world = SimpleNamespace(is_main=True, any_rank=bool)
    made.server = SimpleNamespace(endpoint=lambda: ENDPOINT, sent=SimpleNamespace(bytes=0))
    made.announced = deque(Step(version=version, metrics=metrics) for version, metrics in MADE.items())
    made.version, made.log, made.stop = 3, structlog.get_logger(), threading.Event()
    made.publisher, made.announcing = Publisher(), threading.Lock()
    made.inbox.set_address(ENDPOINT)
    for step in made.announced:
        made.inbox.announce(step)
    made.stop.set()
    return made


def test_the_last_step_is_announced_again_while_the_weights_are_still_served(learner: Learner) -> None:
    learner.broker.redis.delete(learner.broker.key("steps"))
    learner.inbox.announce(Step(version=2))
    assert learner._serve_until_finished() is False
    assert announced(learner) == [2, 1, 2, 3]


def test_the_endpoint_of_the_weights_is_announced_again(learner: Learner) -> None:
    learner.inbox.set_address({"address": "tcp://127.0.0.1:1"})
    learner._announce_again_if_lost()
    assert learner.broker.endpoint("weights") == ENDPOINT
    learner.broker.redis.delete(learner.broker.key("endpoints"))
    learner._announce_again_if_lost()
    assert learner.broker.endpoint("weights") == ENDPOINT


def test_what_was_not_lost_is_told_once(learner: Learner) -> None:
    learner._serve_until_finished()
    assert announced(learner) == [1, 2, 3]


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_steps_that_were_lost_are_announced_in_order_before_the_next(learner: Learner, lost: int) -> None:
    steps = learner.broker.key("steps")
    for entry_id, _ in learner.broker.redis.xrevrange(steps, count=lost):
        learner.broker.redis.xdel(steps, entry_id)
    learner._announce(Step(version=4, metrics={"reward/mean": 1.0}))
    assert announced(learner) == [1, 2, 3, 4]


def test_a_version_that_another_learner_announced_before_does_not_stand_for_ones_own(learner: Learner) -> None:
    steps = learner.broker.key("steps")
    learner.broker.redis.delete(steps)
    learner.inbox.announce(Step(version=3, metrics={"reward/mean": 0.1}))
    learner._announce_again_if_lost()
    assert announced(learner) == [3, 1, 2, 3]


def announced(learner: Learner) -> list[int]:
    return [step.version for step in StepReader(learner.broker).read()]
