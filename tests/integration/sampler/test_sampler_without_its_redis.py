"""A Redis that is empty, or restored from an old backup: the run continues from what was saved with a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.config import Config
from common.errors import UserError
from common.streams.broker import Broker
from common.streams.ledger import SamplerLedger
from sampler.cli import run_once
from sampler.loop import Sampler
from tests.chaos.audit import read_books
from tests.support.books import audited
from tests.support.sampler import NoopGenerator, NoopLearner, make_config, replayed
from tests.support.sampler_driving import committed_counts, drive, start


class Run:
    """A run of six steps, with a checkpoint after each."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self.broker = broker
        episodes = {"rollouts_every": 1}
        self.config: Config = make_config(
            folder, heldout=4, episode=episodes, learner={"keep_checkpoints": 6}, run={"journal": True},
        )  # fmt: skip
        self.counted_at: dict[int, int] = {}  # answers that the saved state of a version holds
        self.join(0)

    def join(self, version: int) -> None:
        """Start generator, learner and sampler, the first two with a version of the weights."""
        self.generator, self.learner = NoopGenerator(self.broker), NoopLearner(self.broker, version)
        self.generator.version = version
        self.sampler = self.start()

    def start(self) -> Sampler:
        return start(self.config, self.broker, SamplerLedger(self.broker, "sampler under test", journal=True))

    def go_to(self, version: int) -> None:
        """Until the sampler has seen this version."""
        while self.sampler.state.version < version:
            before = self.sampler.state.version
            counted = self.broker.counters().get("counted", 0)
            self.sampler.round()
            if self.sampler.state.version > before:
                self.counted_at[self.sampler.state.version] = counted
            if self.sampler.state.version == version:
                return
            self.generator.work(5)
            if self.learner.version < version and self.learner.work(checkpoint=True):
                self.generator.version = self.learner.version

    def finish(self) -> None:
        drive(self.sampler, self.generator, self.learner)


@pytest.fixture
def run(broker: Broker, tmp_path: Path) -> Run:
    return Run(broker, tmp_path)


def books_balance(run: Run) -> None:
    """Every task that was ever sent, and every sample that was ever counted, is accounted for once."""
    counters, steps = run.broker.counters(), run.config.run.steps
    assert counters["dispatched"] == counters["counted"]
    assert counters["counted"] == counters["finished"] + counters.get("superseded", 0) + counters["lost"]
    assert counters["batched"] == steps * run.config.sampler.batch_size
    gone = counters.get("late", 0) + counters["lost_samples"]
    assert counters["rewarded"] == counters["batched"] + gone
    evaluated = [result["version"] for result in run.broker.evaluations()]
    assert evaluated == sorted(set(evaluated))
    assert (evaluated[0], evaluated[-1]) == (0, steps)
    for name in ("outstanding", "open"):
        assert run.broker.redis.hlen(run.broker.key(name)) == 0
    for name in ("tasks", "samples"):
        assert run.broker.redis.xlen(run.broker.key(name)) == 0
    assert run.broker.keys_of("payload:") == []
    assert run.broker.keys_of("tasks:") == []
    lines = audited(read_books(run.broker), run.config)
    assert not any(lines.values()), lines
    begin = run.learner.batches[0].batch_id
    assert f"the counts begin at version {begin}, from which the run went on without its Redis" in lines


def test_from_an_empty_redis_tracker_and_books_go_on_from_the_checkpoint(run: Run) -> None:
    run.go_to(3)
    saved = replayed(run.config, run.sampler.prompts.ids, run.generator.headers[: run.counted_at[3]], 3)
    run.go_to(4)
    run.broker.redis.flushall()
    run.join(3)
    run.sampler.round()
    assert {name: run.sampler.state.tracker.counts(name) for name in saved} == saved
    assert committed_counts(run.broker) == saved, "and Redis has it"
    assert run.broker.counters()["lost"] > 0
    run.finish()
    assert [batch.batch_id for batch in run.learner.batches] == [3, 4, 5]
    books_balance(run)


def test_an_evaluation_that_went_with_redis_is_answered_anew(run: Run) -> None:
    run.go_to(2)
    run.generator.work(2)
    run.sampler.round()
    assert run.sampler.state.open_evaluation == 2
    run.sampler.snapshots.save(2)
    run.broker.redis.flushall()
    run.join(2)
    run.finish()
    (second,) = [result for result in run.broker.evaluations() if result["version"] == 2]
    assert second["samples"] == 4
    books_balance(run)


def test_each_episode_is_in_the_files_once_after_redis_was_lost(run: Run) -> None:
    run.go_to(4)
    run.broker.redis.flushall()
    run.join(3)
    run.finish()
    folder = run.config.run.folder / "rollouts"
    rows = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
    ids = [row["task_id"] for row in rows]
    assert len(ids) == len(set(ids))
    written = {row["task_id"]: row["prompt_id"] for row in rows}
    for task in run.generator.tasks:
        if task.kind == "train":
            assert written[task.task_id] == task.prompt_id, "what is written is what was asked after the loss"


def test_a_sampler_killed_while_it_restores_does_so_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.go_to(4)
    run.broker.redis.flushall()
    run.join(3)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            run.sampler.round()
    run.sampler = start(run.config, run.broker, run.sampler.ledger)
    run.finish()
    books_balance(run)


def test_an_old_backup_gives_way_to_the_newer_state_of_the_run_folder(run: Run) -> None:
    run.go_to(1)
    backup = {name: run.broker.redis.dump(name) for name in run.broker.redis.keys("*")}
    run.go_to(4)
    saved = replayed(run.config, run.sampler.prompts.ids, run.generator.headers[: run.counted_at[4]], 4)
    run.broker.redis.flushall()
    for name, value in backup.items():
        run.broker.redis.restore(name, 0, value)

    run.generator = NoopGenerator(run.broker)
    run.learner = NoopLearner(run.broker, 4)
    run.generator.version = 4
    behind = run.start()
    assert not run_once(Stepping(behind))
    run.sampler = start(run.config, run.broker, behind.ledger)
    run.sampler.round()
    assert committed_counts(run.broker) == saved
    run.finish()
    assert [batch.batch_id for batch in run.learner.batches] == [4, 5]
    books_balance(run)


def test_a_learner_that_went_on_while_an_old_backup_was_restored_must_be_started_again(run: Run) -> None:
    run.go_to(1)
    backup = {name: run.broker.redis.dump(name) for name in run.broker.redis.keys("*")}
    run.go_to(4)
    run.broker.redis.flushall()
    for name, value in backup.items():
        run.broker.redis.restore(name, 0, value)
    NoopLearner(run.broker, 5)
    with pytest.raises(UserError, match="from a backup of version 1, and the learner goes on from 5"):
        start(run.config, run.broker).round()


def test_a_learner_that_is_ahead_of_a_sampler_that_was_away_is_no_lost_redis(run: Run) -> None:
    run.go_to(2)
    run.generator.work(64)
    run.sampler.round()
    while run.learner.work(checkpoint=True):
        run.generator.version = run.learner.version
    assert run.learner.version > run.sampler.state.version
    run.sampler = start(run.config, run.broker, run.sampler.ledger)
    run.finish()
    assert "lost" not in run.broker.counters()


class Stepping:
    """A sampler that makes one round when it is run."""

    def __init__(self, sampler: Sampler) -> None:
        self.run, self.metrics, self.ledger = sampler.round, sampler.metrics, sampler.ledger
        self.stop, self.timeline = sampler.stop, sampler.timeline
