"""A version is served and announced while the next batch is trained on; what is served is the version all the same."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch

from common.log import Timeline
from common.messages import Batch, Step
from common.streams.batches import BatchInbox, StepReader
from common.streams.broker import Broker
from common.weights.server import SentStats
from learner import loop
from learner.loop import Learner
from learner.publishing import Publisher, RankCopies
from learner.stats import Phases
from learner.weight_copy import WeightCopy, copy_weights
from learner.world import World
from tests.support.learner import learner_config

DEADLINE = 60.0


class Trainer:
    """Adds one to the only weight; says when it begins."""

    def __init__(self) -> None:
        self.weight = torch.zeros(8)
        self.began = [threading.Event() for _ in range(4)]
        self.before_update: Any = None
        self.policy = SimpleNamespace(vocabulary=1)

    def train(self, rollouts: Any, phases: Phases, record: Any) -> dict[str, float]:
        self.began[int(self.weight[0])].set()
        self.weight += 1
        return {"batch/left_out": 0.0}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", self.weight


class Server:
    """Serves a version only once the learner trains on the batch after it."""

    def __init__(self, trainer: Trainer, broker: Broker) -> None:
        self.trainer, self.broker, self.sent = trainer, broker, SentStats()
        self.served: list[float] = []
        self.announced_before: list[list[int]] = []
        self.failure: Exception | None = None

    def memory(self) -> None:
        return None

    def copy(self, version: int, tensors: Any, dtype: torch.dtype, prompt: Any, **options: Any) -> WeightCopy:
        return copy_weights(version, tensors, dtype, 1 << 20, prompt=prompt, **options)

    def serve(self, copy: WeightCopy, checksums: dict[int, int]) -> None:
        if self.failure is not None:
            raise self.failure
        version = copy.manifest["version"]
        assert self.trainer.began[version].wait(DEADLINE)
        self.announced_before.append([step.version for step in StepReader(self.broker).read()])
        snapshot = copy.snapshot(checksums)
        self.served.append(float(torch.frombuffer(bytearray(snapshot.chunks[0]), dtype=torch.float32)[0]))

    def endpoint(self) -> dict[str, str]:
        return {"address": "tcp://127.0.0.1:5555"}


@pytest.fixture
def learner(fake_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Learner:
    monkeypatch.setattr(loop, "scored_prompt", lambda trainer: None)
    monkeypatch.setattr(loop, "own_share", lambda *_: None)
    made = object.__new__(Learner)
    made.broker, made.inbox, made.presence = fake_broker, BatchInbox(fake_broker).acquire(), None
    made.world = SimpleNamespace(is_main=True, rank=0, device=torch.device("cpu"))
    made.trainer = Trainer()
    made.server = Server(made.trainer, fake_broker)
    made.publisher, made.announcing, made.announced = Publisher(), threading.Lock(), deque()
    made.version, made.sent, made.log = 0, SentStats(), structlog.get_logger()
    made.timeline = Timeline(None, "learner")
    settings = SimpleNamespace(checkpoint_every=100)
    made.config = SimpleNamespace(learner=settings, run=SimpleNamespace(steps=100, folder=None))
    made.copies = RankCopies(learner_config("m", "runs", dtype="float32"), World(0, 1, torch.device("cpu")))
    return made


def train(learner: Learner) -> None:
    batch = Batch(batch_id=learner.version, sample_ids=[], advantages=[], rewards=[], tokens=[])
    learner._train(batch, Phases(learner.timeline))


def announced(learner: Learner) -> list[int]:
    return [step.version for step in StepReader(learner.broker).read()]


def test_the_next_batch_is_trained_on_before_a_version_is_served(learner: Learner) -> None:
    train(learner)  # makes version 1, which `Server` serves when the batch after it is trained on
    train(learner)
    learner.trainer.began[2].set()
    learner.publisher.wait()
    # What was served is the weights as they were when the version was made.
    assert learner.server.served == [1.0, 2.0]
    # Nobody heard of a version before it was served.
    assert learner.server.announced_before == [[], [1]]
    assert announced(learner) == [1, 2]


def test_what_fails_while_a_version_is_served_ends_the_learner(learner: Learner) -> None:
    learner.server.failure = ValueError("no memory")
    train(learner)
    with pytest.raises(ValueError, match="no memory"):
        learner.publisher.wait()
    assert announced(learner) == []
    learner.publisher.close()


def test_a_checkpoint_is_announced_after_its_version(learner: Learner) -> None:
    train(learner)
    learner.trainer.began[1].set()
    learner._announce_checkpoint()
    assert [(step.version, step.checkpoint) for step in StepReader(learner.broker).read()] == [(1, False), (1, True)]


def test_a_publisher_raises_a_failure_once_and_goes_on() -> None:
    publisher, done = Publisher(), threading.Event()

    def fail() -> None:
        raise ValueError("first")

    publisher.submit(fail)
    with pytest.raises(ValueError, match="first"):
        publisher.submit(done.set)
    publisher.submit(done.set)
    publisher.wait()
    assert done.is_set()
    publisher.check()
    publisher.close()


def test_a_copy_does_not_change_with_the_model_before_it_is_served() -> None:
    weights = {"a": torch.randn(1000), "b": torch.randn(3, 5)}
    expected = copy_weights(0, weights.items(), torch.bfloat16, 512, snapshot="x-0").snapshot()
    copy = copy_weights(0, weights.items(), torch.bfloat16, 512, snapshot="x-0")
    for tensor in weights.values():
        tensor.add_(1)
    assert copy.snapshot().manifest == expected.manifest
    assert b"".join(copy.snapshot().chunks) == b"".join(expected.chunks)


def test_steps_have_what_the_learner_measured_before_it_announced_them(learner: Learner) -> None:
    train(learner)
    learner.trainer.began[1].set()
    learner.publisher.wait()
    (step,) = StepReader(learner.broker).read()
    assert isinstance(step, Step)
    assert {"seconds/publish", "seconds/payload"} <= step.metrics.keys()
