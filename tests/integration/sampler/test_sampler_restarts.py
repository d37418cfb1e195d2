"""The sampler killed anywhere, Redis lost or gone back in time: each task is counted once, or counted as lost."""

from __future__ import annotations

import os
import random
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from common.errors import UserError
from common.files import tracker_path
from common.messages import Step
from common.streams.batches import RunLost
from common.streams.broker import Broker
from common.streams.lease import RedisBehind
from common.streams.ledger import Commit, SamplerLedger
from sampler.cli import run_once
from sampler.loop import Sampler
from tests.support.sampler import NoopGenerator, NoopLearner, make_config, replayed
from tests.support.sampler_driving import audited, committed_counts, drive, reach, start, started
from tests.support.streams import put_back, saved_keys
from tests.support.whole_run import json_lines


class Killed(Exception): ...


class FragileLedger(SamplerLedger):
    """A ledger whose process dies at random: before a commit, or after it and before its reply."""

    def __init__(self, broker: Broker, rng: random.Random, chance: float) -> None:
        super().__init__(broker, "sampler under test", journal=True)
        self.rng, self.chance = rng, chance

    def commit(self, commit: Commit) -> int:
        fate = self.rng.random()
        if fate < self.chance:
            raise Killed
        counted = super().commit(commit)
        if fate > 1 - self.chance:
            raise Killed
        return counted


@pytest.mark.parametrize(("method", "seed"), [("spo", 0), ("grpo", 6)])
def test_killed_anywhere_it_ends_with_the_same_tracker(broker: Broker, tmp_path: Path, method: str, seed: int) -> None:
    # Fewer prompts than tasks in flight.
    algorithm = {"method": method, "group_size": 4}
    config = make_config(tmp_path, prompts=5, heldout=3, episode={"rollouts_every": 3}, algorithm=algorithm)
    rng = random.Random(seed)
    generator, learner = NoopGenerator(broker), NoopLearner(broker, folder=config.run.folder)
    deaths = 0
    while not broker.finished():
        sampler = start(config, broker, FragileLedger(broker, rng, chance=0.2))
        try:
            for _ in range(1000):
                sampler.round()
                if sampler.over():
                    broker.finish()
                    break
                generator.work(rng.randrange(1, 20))
                if rng.random() < 0.5 and learner.work():
                    generator.version = learner.version
        except Killed:
            deaths += 1
            generator.work(3)  # answers go on coming in while no sampler counts
    assert deaths >= 3
    audited(broker, config)
    assert committed_counts(broker) == replayed(config, sampler.prompts.ids, generator.headers, 6)
    prompts = {header.task_id: header.prompt_id for header in generator.headers}
    for batch in learner.batches:
        sizes = Counter(prompts[sample_id] for sample_id in batch.sample_ids)
        assert all(size % config.algorithm.responses == 0 for size in sizes.values())
    assert [result["version"] for result in broker.evaluations()] == [0, 2, 4, 6]
    assert {path.stem for path in (tmp_path / "default/rollouts").glob("*.jsonl")} == {"0", "3"}


class PowerCut(SamplerLedger):
    """A ledger that wants all lines on the disk before they are counted, since the power may be cut right afterwards.

    Attributes:
        synced: what the disk has of each file (its size) and folder (its names), by inode.
    """

    def __init__(self, broker: Broker, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(broker, "sampler under test")
        self.folder, self.synced, self.names = folder, dict[int, Any](), set[str]()
        sync = os.fsync

        def fsync(descriptor: int) -> None:
            sync(descriptor)
            status = os.fstat(descriptor)
            is_folder = stat.S_ISDIR(status.st_mode)
            self.synced[status.st_ino] = os.listdir(descriptor) if is_folder else status.st_size

        monkeypatch.setattr(os, "fsync", fsync)

    def commit(self, commit: Commit) -> int:
        for path in (self.folder / "metrics.jsonl", *self.folder.glob("rollouts/*"), *self.folder.glob("val*/*")):
            if path.exists():
                self.names.add(str(path.relative_to(self.folder)))
                assert self.synced.get(path.stat().st_ino) == path.stat().st_size, path
                assert path.name in self.synced[path.parent.stat().st_ino]
        return super().commit(commit)


def test_files_are_on_the_disk_when_counted(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, heldout=100, episode={"rollouts_every": 3}, run={"steps": 3})
    ledger = PowerCut(broker, config.run.folder, monkeypatch)
    drive(start(config, broker, ledger), NoopGenerator(broker), NoopLearner(broker))
    expected = {"metrics.jsonl", "rollouts/0.jsonl", "validation_data/0.jsonl", "validation_data/0.jsonl.part"}
    assert expected <= ledger.names


def test_a_learner_that_repeats_steps_gets_no_batch_twice(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path)
    reach(sampler, generator, learner, 3)
    for version in (2, 3):  # back to a checkpoint of version 2, and the batch after it once more
        learner.inbox.announce(Step(version=version, drift=9.0))
    drive(sampler, generator, learner)
    audited(broker, sampler.config)
    assert committed_counts(broker) == replayed(sampler.config, sampler.prompts.ids, generator.headers, 6)


class Run:
    def __init__(self, broker: Broker, folder: Path) -> None:
        self.broker = broker
        sections = {"episode": {"rollouts_every": 1}, "learner": {"keep_checkpoints": 6}, "run": {"journal": True}}
        self.config = make_config(folder, heldout=4, **sections)
        self.saved: dict[int, dict[str, object]] = {}  # values of the prompts, as they are saved with a version
        self.backup: dict[bytes, bytes] = {}  # of Redis
        self.join(0)

    def join(self, version: int) -> None:
        """Start generator, learner and sampler, the first two with a version of the weights."""
        self.generator = NoopGenerator(self.broker)
        self.learner = NoopLearner(self.broker, version, self.config.run.folder)
        self.generator.version = version
        self.sampler = self.start()

    def start(self) -> Sampler:
        return start(self.config, self.broker, SamplerLedger(self.broker, "sampler under test", journal=True))

    def go_to(self, version: int) -> None:
        while (before := self.sampler.state.version) < version:
            counted = self.broker.counters().get("counted", 0)
            self.sampler.round()
            if (seen := self.sampler.state.version) > before:
                headers = self.generator.headers[:counted]
                self.saved[seen] = replayed(self.config, self.sampler.prompts.ids, headers, seen)
            if seen == version:
                return
            self.generator.work(5)
            if self.learner.version < version and self.learner.work(checkpoint=True):
                self.generator.version = self.learner.version

    def reset(self) -> None:
        """In its next round the sampler finds that Redis is behind, and resets the run."""
        with patch.object(self.sampler, "run", self.sampler.round):
            assert not run_once(self.sampler), "another must start from the checkpoint"

    def finish(self) -> None:
        """Go on to the end; every task that was sent and every sample that was counted is accounted for once."""
        drive(self.sampler, self.generator, self.learner)
        audited(self.broker, self.config)
        assert self.broker.evaluations()[0]["version"] == 0


@pytest.fixture
def run(broker: Broker, tmp_path: Path) -> Run:
    return Run(broker, tmp_path)


def empty(run: Run) -> None:
    run.broker.redis.flushall()
    run.reset()


def go_back(run: Run) -> None:
    before = saved_keys(run.broker)
    run.generator.work(4)
    run.sampler.round()
    put_back(run.broker, before)
    run.generator.work(4)
    run.reset()


def lose_headers(run: Run) -> None:
    read, samples = run.sampler.ledger.read, run.broker.key("samples")

    def read_and_lose(*arguments: int) -> Any:
        headers = read(*arguments)
        run.broker.redis.xack(samples, "sampler", *(entry_id for entry_id, _ in headers))
        run.broker.redis.xtrim(samples, maxlen=0)
        return headers

    run.generator.work(4)
    with patch.object(run.sampler.ledger, "read", read_and_lose):
        run.reset()


def restore_backup(run: Run) -> None:
    """All processes are stopped, and start with an older Redis."""
    put_back(run.broker, run.backup)
    before = files_of(run.config.run.folder)
    with pytest.raises(RedisBehind, match="Redis has no batch 2, the run folder has a state of version 4"):
        run.start()
    assert files_of(run.config.run.folder) == before
    run.sampler.ledger.reset()


def start_learner_ahead(run: Run) -> None:
    """The sampler has begun with an older Redis, before it could see the newer states of the run folder."""
    put_back(run.broker, run.backup)
    folder = tracker_path(run.config.run.folder, 0).parent
    away = folder.rename(folder.with_name("away"))
    run.sampler = run.start()
    away.rename(folder)
    NoopLearner(run.broker, 4)
    run.reset()


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.suffix in {".jsonl", ".npz", ".part"}}


@pytest.mark.parametrize("lose", [empty, go_back, lose_headers, restore_backup, start_learner_ahead])
def test_whatever_redis_has_lost_a_run_starts_from_the_newest_checkpoint(run: Run, lose: Callable[[Run], None]) -> None:
    run.go_to(1)
    run.backup = saved_keys(run.broker)
    run.go_to(4)
    lose(run)
    with pytest.raises((RedisBehind, RunLost)):
        run.learner.inbox.check()
    run.join(4)
    # Killed while it restores the state, the sampler does so again.
    with patch.object(run.sampler, "write", side_effect=Killed), pytest.raises(Killed):
        run.sampler.round()
    run.sampler = run.start()
    run.sampler.round()
    assert {name: run.sampler.state.tracker.counts(name) for name in run.saved[4]} == run.saved[4]
    assert committed_counts(run.broker) == run.saved[4], "and Redis has it"
    assert run.broker.counters()["lost"] > 0
    run.finish()
    assert [batch.batch_id for batch in run.learner.batches] == [4, 5]
    rows = json_lines(*(run.config.run.folder / "rollouts").iterdir())
    written = {row["task_id"]: row["prompt_id"] for row in rows}
    assert len(written) == len(rows)
    asked = {task.task_id: task.prompt_id for task in run.generator.tasks if task.kind == "train"}
    assert asked.items() <= written.items(), "what is written is what was asked after the loss"


def test_an_episode_answered_again_is_kept_as_it_was_counted(run: Run) -> None:
    """Redis loses the end of its log: results, and tasks whose ids are then given at another version."""
    broker, generator = run.broker, run.generator
    run.go_to(1)
    while not broker.redis.xlen(broker.key("batches")):
        run.sampler.round()
        generator.work(4)
    then = saved_keys(broker), len(generator.headers)
    run.learner.work()
    run.sampler.round()
    generator.work(reward=0.25)
    run.sampler.round()
    put_back(broker, then[0])
    del generator.headers[then[1] :], generator.tasks[then[1] :]
    generator.work(4, status="set_aside", reason="the sandbox was away")
    run.sampler = run.start()  # not the one that counted what is lost
    run.sampler.round()
    generator.work()
    drive(run.sampler, generator, NoopLearner(broker, 1))
    rows = json_lines(*(run.config.run.folder / "rollouts").iterdir())
    kept = {row["task_id"]: row["reward"] for row in rows}
    assert len(kept) == len(rows)
    counted = [header for header in generator.headers if header.kind == "train"]
    assert kept == {one.task_id: one.reward if one.status == "ok" else None for one in counted}


@pytest.mark.parametrize("answers", [2, 64])
def test_an_answer_that_redis_forgot_leaves_its_evaluation(run: Run, answers: int) -> None:
    run.go_to(2)
    assert run.sampler.state.open_evaluation == 2
    then = saved_keys(run.broker)
    run.generator.work(answers, reward=0.25)
    run.sampler.round()
    put_back(run.broker, then)
    run.sampler = run.start()
    run.finish()


def test_an_evaluation_that_went_with_redis_is_answered_again(run: Run) -> None:
    run.go_to(2)
    run.generator.work(2)
    run.sampler.round()
    assert run.sampler.state.open_evaluation == 2
    run.sampler.snapshots.save(2)
    run.broker.redis.flushall()
    run.join(2)
    run.finish()
    assert [result["samples"] for result in run.broker.evaluations() if result["version"] == 2] == [4]


def test_states_of_versions_that_are_made_again_are_removed(run: Run) -> None:
    """The newest checkpoint is older than the newest state: the learner was killed before it was on the disk."""
    run.go_to(4)
    run.sampler.ledger.reset()
    run.join(3)
    run.sampler.round()
    assert not tracker_path(run.config.run.folder, 4).is_file()
    run.finish()


def test_without_a_saved_state_values_start_again(run: Run) -> None:
    run.go_to(1)
    run.sampler.ledger.reset()
    tracker_path(run.config.run.folder, 1).unlink()
    run.join(1)
    run.sampler.round()
    assert committed_counts(run.broker) == {}
    assert run.sampler.state.version == 1


def test_states_of_another_run_are_removed_or_named(run: Run) -> None:
    other = tracker_path(run.config.run.folder, 9)
    other.mkdir(parents=True)  # root too cannot unlink a folder
    with pytest.raises(UserError, match=r"step_9\.npz cannot be removed: Is a directory"):
        run.go_to(1)
    other.rmdir()
    other.write_bytes(b"of another run")
    run.join(0)
    run.go_to(1)
    assert not other.exists()


def test_a_learner_ahead_of_its_sampler_is_no_lost_redis(run: Run) -> None:
    run.go_to(2)
    run.generator.work(64)
    run.sampler.round()
    while run.learner.work(checkpoint=True):
        run.generator.version = run.learner.version
    assert run.learner.version > run.sampler.state.version
    drive(start(run.config, run.broker, run.sampler.ledger), run.generator, run.learner)
    assert "lost" not in run.broker.counters()
