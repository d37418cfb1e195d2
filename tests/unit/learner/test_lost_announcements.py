"""A Redis that has gone back in time: what the learner had told is told again, whatever it waits for."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from common.messages import Step
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.steps import StepReader, latest
from learner.loop import Learner

ENDPOINT = {"address": "tcp://127.0.0.1:5555"}


@pytest.fixture
def learner(fake_broker: Broker) -> Learner:
    """One that has told of version 3 and serves it; it leaves when it is asked to stop."""
    made = object.__new__(Learner)
    made.broker, made.inbox, made.presence = fake_broker, BatchInbox(fake_broker).acquire(), None
    made.world = SimpleNamespace(is_main=True, any_rank=bool)
    made.server = SimpleNamespace(endpoint=lambda: ENDPOINT, sent=SimpleNamespace(bytes=0))
    made.last_step, made.version, made.stop = Step(version=3), 3, threading.Event()
    made.inbox.set_address(ENDPOINT)
    made.inbox.announce(made.last_step)
    made.stop.set()
    return made


def test_the_last_step_is_announced_again_while_the_weights_are_still_served(learner: Learner) -> None:
    learner.broker.redis.delete(learner.broker.key("steps"))
    learner.inbox.announce(Step(version=2))
    assert learner._serve_until_finished() is False
    assert latest(learner.broker) == learner.last_step


def test_the_endpoint_of_the_weights_is_announced_again(learner: Learner) -> None:
    learner.inbox.set_address({"address": "tcp://127.0.0.1:1"})
    learner._announce_again_if_lost()
    assert learner.broker.endpoint("weights") == ENDPOINT
    learner.broker.redis.delete(learner.broker.key("endpoints"))
    learner._announce_again_if_lost()
    assert learner.broker.endpoint("weights") == ENDPOINT


def test_what_was_not_lost_is_told_once(learner: Learner) -> None:
    learner._serve_until_finished()
    assert [step.version for step in StepReader(learner.broker).read()] == [3]
