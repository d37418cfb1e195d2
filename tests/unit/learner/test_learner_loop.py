"""A version is served and announced while the next batch is trained on; what is wrong with a batch ends the run."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch

from common.errors import UserError
from common.held_folder import HeldFolder
from common.log import Timeline
from common.streams.batches import BatchInbox
from common.streams.broker import Broker, Memory
from common.streams.steps import StepReader
from common.weights.server import SentStats
from learner import loop
from learner.batch.left_out import LeftOut
from learner.loop import Learner
from learner.publish.publisher import Publisher, RankCopies
from learner.publish.weight_copy import ScoredPrompt, WeightCopy, copy_weights
from learner.ranks.heap import Heap
from learner.stats import Phases
from tests.support.learner import ALONE, learner_config, manifest

DEADLINE = 600.0
PROMPT = ScoredPrompt([1, 2, 3], [-2.0, -3.0])
ENDPOINT = {"address": "tcp://127.0.0.1:5555"}


class Counting:
    """A trainer that adds one to the only weight, and says when it begins."""

    def __init__(self) -> None:
        self.weight = torch.zeros(8)
        self.began = [threading.Event() for _ in range(4)]
        self.before_update: Any = None
        self.not_finite = 0
        self.left_out = 0.0

    def packer(self) -> Any:
        return SimpleNamespace(own_share=lambda *_: SimpleNamespace(reason=""))

    def train(self, rollouts: Any, phases: Phases, record: Any) -> dict[str, float]:
        self.began[int(self.weight[0])].set()
        self.weight += 1
        return {"batch/left_out": self.left_out}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", self.weight


class Server:
    """Serves a version only once the learner trains on the batch after it."""

    def __init__(self, trainer: Counting, broker: Broker) -> None:
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
        assert self.trainer.began[copy.manifest["version"]].wait(DEADLINE)
        self.announced_before.append([step.version for step in StepReader(self.broker).read()])
        snapshot = copy.snapshot(checksums)
        self.served.append(float(torch.frombuffer(bytearray(snapshot.chunks[0]), dtype=torch.float32)[0]))

    def endpoint(self) -> dict[str, str]:
        return ENDPOINT


@pytest.fixture
def learner(fake_broker, monkeypatch, tmp_path):
    """Version 0, nothing announced."""
    monkeypatch.setattr(loop, "scored_prompt", lambda trainer: PROMPT)
    made = object.__new__(Learner)
    made.broker, made.inbox, made.presence = fake_broker, BatchInbox(fake_broker).acquire(), None
    made.world, made.trainer = ALONE, Counting()
    made.server = Server(made.trainer, fake_broker)
    made.publisher = Publisher()
    made.folder = HeldFolder(tmp_path)
    made.version, made.sent, made.log, made.stop = 0, SentStats(), structlog.get_logger(), threading.Event()
    made.left_out = LeftOut(learner_config("m", "runs", run={"steps": 4}), fake_broker)
    made.timeline, made.heap = Timeline(None, "learner"), Heap()
    made.masked, made.masked_advice = [], "masked by preset icepop"
    section = SimpleNamespace(checkpoint_every=100, lr=1e6)
    made.config = SimpleNamespace(learner=section, run=SimpleNamespace(steps=100, folder=None))
    made.checkpoints, made.saved, made.most_weight = SimpleNamespace(begun=None), 0, 1e5
    made.copies = RankCopies(learner_config("m", "runs", dtype="float32"), ALONE)
    return made


def train(learner: Learner) -> None:
    learner._train(manifest("abcd", [1] * 4, batch_id=learner.version), Phases(learner.timeline))


def announced(learner: Learner) -> list[int]:
    return [step.version for step in StepReader(learner.broker).read()]


def test_the_next_batch_is_trained_on_before_a_version_is_served(learner):
    train(learner)  # makes version 1, which `Server` serves when the batch after it is trained on
    train(learner)
    learner.trainer.began[2].set()
    learner.publisher.wait()
    assert learner.server.served == [1.0, 2.0], "the weights as they were when the version was made"
    assert learner.server.announced_before == [[], [1]], "a version is announced once it can be pulled"
    assert announced(learner) == [1, 2]
    assert {"seconds/publish", "seconds/payload"} <= StepReader(learner.broker).read()[0].metrics.keys()


def test_a_checkpoint_is_announced_after_its_version(learner):
    train(learner)
    learner.trainer.began[1].set()
    learner._announce_checkpoint()
    assert [(step.version, step.checkpoint) for step in StepReader(learner.broker).read()] == [(1, False), (1, True)]


def test_what_fails_while_a_version_is_served_ends_the_learner(learner):
    learner.server.failure = ValueError("no memory")
    train(learner)
    with pytest.raises(ValueError, match="no memory"):
        learner.publisher.wait()
    assert announced(learner) == []
    # A failure is raised once.
    learner.publisher.submit((done := threading.Event()).set)
    learner.publisher.wait()
    assert done.is_set()
    learner.publisher.check()
    learner.publisher.shutdown()


@pytest.mark.parametrize(
    ("skipped", "weight", "logprob", "reason"),
    [
        (3, 0.0, -2.0, "3 gradients in a row were not finite"),
        (0, math.nan, -2.0, "weights up to nan, and a mean log-prob of -1 for a fixed prompt"),
        (0, -1e6, -2.0, "weights up to 1e+06, and a mean log-prob of -1 for a fixed prompt"),
        (0, 0.0, -3e13, "weights up to 1, and a mean log-prob of -1.5e+13 for a fixed prompt"),
    ],
)
def test_a_policy_that_diverged_is_not_published(learner, monkeypatch, skipped, weight, logprob, reason):
    monkeypatch.setattr(loop, "scored_prompt", lambda trainer: PROMPT._replace(logprobs=[0.0, logprob]))
    learner.trainer.not_finite = skipped
    learner.trainer.weights = lambda: iter([("weight", torch.tensor([1.0, weight]))])
    line = f"diverged at step 1: {reason}; lower learner.lr (1e+06); start the run again to continue from step 0"
    with pytest.raises(UserError, match=re.escape(line)):
        train(learner)
    learner.publisher.wait()
    assert (learner.version, announced(learner), learner.server.served) == (0, [], [])


def test_a_batch_with_too_few_samples_makes_no_version(learner):
    learner.trainer.left_out, learner.trainer.not_finite = 1.0, 2  # of 16 samples, and of 3 gradients
    train(learner)
    learner.trainer.left_out = 4.0
    with pytest.raises(UserError, match=r"5 samples of the last 2 batches, of 4 each, could not be trained on"):
        train(learner)
    assert learner.version == 1


def test_a_model_that_is_not_finite_is_refused_at_the_start(learner):
    learner.trainer.weight[3] = math.nan
    learner.config.model = SimpleNamespace(path="broken/model")
    with pytest.raises(UserError, match="broken/model cannot be trained: weights up to nan"):
        learner._copy_weights(0)


@pytest.mark.parametrize(
    ("shares", "warned"),
    [
        ([0.0, 0.9, 0.9, 0.9], []),
        ([0.0, 0.9, 0.7, 0.6, 0.5, 0.8], ["54%"]),
        ([0.3] * 5 + [0.0, 0.0] + [0.5] * 3, ["30%", "26%"]),  # it has been better in between
    ],
)
def test_steps_whose_tokens_are_mostly_masked_are_warned_of_once(learner, shares, warned):
    with structlog.testing.capture_logs() as lines:
        for share in shares:
            learner._watch_masking({"rollout_corr/masked_fraction": share})
    words = "of the tokens of the last 5 steps are masked by preset icepop"
    assert [line["event"] for line in lines] == [f"{share} {words}" for share in warned]


def test_a_run_folder_that_is_replaced_ends_it(learner, tmp_path):
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    tmp_path.mkdir()
    with pytest.raises(UserError, match=f"^run folder {tmp_path} was moved away or deleted"):
        learner._serve_until_finished()
    learner.checkpoints.is_written = True
    with pytest.raises(UserError, match="was moved away"):
        learner._next_batch()


SAMPLES = 32


class Evicting(Broker):
    """A broker of a server with this policy that has dropped this many keys."""

    def __init__(self, policy: str = "noeviction", evicted: int = 0) -> None:
        super().__init__(None, "run")  # type: ignore[arg-type]
        self._policy, self._evicted = policy, evicted

    def memory(self) -> Memory:
        return Memory(1, 2, self._policy)

    def evicted(self) -> int:
        return self._evicted


def ended_after(
    batches: list[int], steps: int = 100, broker: Broker | None = None, reason: str = "", **learner: Any
) -> tuple[int, str]:
    """The batch with which the run ends, from 1 on, and the line; 0 where it goes on."""
    config = learner_config("m", "runs", run={"steps": steps}, **learner)
    counts = LeftOut(config, broker or Evicting())
    for number, left_out in enumerate(batches, 1):
        try:
            counts.add(SAMPLES, left_out, reason, saved=2)
        except UserError as error:
            return number, str(error)
    return 0, ""


@pytest.mark.parametrize(
    ("batches", "steps", "share", "ends"),
    [
        ([0] * 20 + [SAMPLES], 100, 0.1, 21),  # a whole batch
        ([3] * 50, 100, 0.1, 0),  # less than a tenth of each
        ([25, 0, 0, 0, 0, 0, 0, 0, 25], 100, 0.1, 0),  # eight batches apart
        ([25, 0, 0, 0, 0, 0, 0, 25], 100, 0.1, 8),
        ([26, 26, 25, 26, 26], 5, 0.1, 1),  # a shorter run has fewer batches
        ([1], 1, 0.0, 1),
        ([SAMPLES] * 5, 5, 1.0, 0),
    ],
)
def test_a_run_ends_beyond_a_share_of_its_newest_batches(batches, steps, share, ends):
    number, line = ended_after(batches, steps, max_left_out=share)
    assert number == ends
    assert (f"more than learner.max_left_out = {share:g}" in line) == bool(ends)


@pytest.mark.parametrize(
    ("broker", "reason", "cause"),
    [
        (Evicting("allkeys-lru", 1029), "", "Redis has dropped 1,029 keys .*CONFIG SET maxmemory-policy noeviction"),
        (Evicting(evicted=3), "", "has dropped 3 keys"),  # the policy was changed meanwhile
        (Evicting(), "2 returns for 4 turns", r"because of its tokens \(2 returns for 4 turns\)"),
        (Evicting(), "", "has evicted no key itself"),
    ],
)
def test_the_line_names_the_likely_cause_and_a_way_on(broker, reason, cause):
    number, line = ended_after([SAMPLES], broker=broker, reason=reason)
    assert number == 1
    assert "start the run again, from step 2, with -o learner.max_left_out=1" in line
    with pytest.raises(UserError, match=cause):
        raise UserError(line)
