"""The sampler killed anywhere, and Redis or the learner gone back in time: each task is counted once all the same."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from common.messages import Step
from common.streams.broker import Broker
from common.streams.ledger import Commit, OutOfStep, SamplerLedger
from sampler.cli import run_once
from sampler.loop import Sampler
from tests.support.sampler import NoopGenerator, NoopLearner, make_config, replayed
from tests.support.sampler_driving import committed_counts, drive, each_task_once, reach, start, started

pytestmark = pytest.mark.integration


class Killed(Exception):
    """The sampler process is gone."""


class FragileLedger(SamplerLedger):
    """A ledger whose process dies at random: before a commit, or after it and before anybody knows."""

    def __init__(self, broker: Broker, rng: random.Random, chance: float) -> None:
        super().__init__(broker, "sampler under test")
        self.rng, self.chance = rng, chance

    def commit(self, commit: Commit) -> int:
        fate = self.rng.random()
        if fate < self.chance:
            raise Killed
        counted = super().commit(commit)
        if fate > 1 - self.chance:
            raise Killed
        return counted


@pytest.mark.parametrize(("method", "seed"), [*(("spo", seed) for seed in range(6)), ("grpo", 6), ("grpo", 7)])
def test_killed_anywhere_it_counts_each_task_once_and_ends_with_the_same_tracker(
    broker: Broker, tmp_path: Path, method: str, seed: int
) -> None:
    # Fewer prompts than tasks in flight.
    algorithm = {"method": method, "group_size": 4}
    config = make_config(tmp_path, prompts=5, heldout=3, episode={"rollouts_every": 3}, algorithm=algorithm)
    rng = random.Random(seed)
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
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
            generator.work(3)  # answers go on coming in while nobody counts
    assert deaths >= 3
    each_task_once(broker, generator, learner, config)
    assert committed_counts(broker) == replayed(config, sampler.prompts.ids, generator.headers, 6)
    prompts = {header.task_id: header.prompt_id for header in generator.headers}
    for batch in learner.batches:
        sizes = Counter(prompts[sample_id] for sample_id in batch.sample_ids)
        assert all(size % config.algorithm.responses == 0 for size in sizes.values())
    assert [result["version"] for result in broker.evaluations()] == [0, 2, 4, 6]
    for version in (0, 2, 4, 6):
        lines = (tmp_path / f"default/validation_data/{version}.jsonl").read_text().splitlines()
        assert [json.loads(line)["task_id"] for line in lines] == [f"e{version}-{n}" for n in range(3)]
    assert kept_rollouts(tmp_path) == [task.task_id for task in generator.tasks if task.keep]
    assert {path.stem for path in (tmp_path / "default/rollouts").glob("*.jsonl")} == {"0", "3"}


def kept_rollouts(folder: Path) -> list[str]:
    """Task ids of all rollouts, in the order of dispatch; each must lie in its version's file."""
    task_ids = []
    for path in (folder / "default/rollouts").glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert {row["version"] for row in rows} == {int(path.stem)}
        task_ids += [row["task_id"] for row in rows]
    return sorted(task_ids)


def test_the_baseline_may_be_frozen_at_dispatch_and_survives_a_restart(broker: Broker, tmp_path: Path) -> None:
    config = make_config(
        tmp_path, prompts=1,
        sampler={"batch_size": 2, "max_staleness": 0, "advantage": {"baseline": "dispatch"}},
    )  # fmt: skip
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    start(config, broker).round()
    sampler = start(config, broker)
    generator.work(1, reward=1.0)
    generator.work(1, reward=1.0)
    sampler.round()
    assert learner.work()
    assert learner.batches[0].advantages == [0.0, 0.0], "both answers are compared with the value at dispatch"


def test_without_redis_state_it_resumes_from_the_tracker_checkpoint(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=2)
    while learner.version < 4:
        sampler.round()
        generator.work()
        if learner.work(checkpoint=learner.version == 3):
            generator.version = learner.version
    counted = broker.counters()["counted"]
    sampler.round()  # sees the step, and writes what was counted until then
    assert (tmp_path / "default/checkpoints/tracker/step_4.npz").is_file()
    before = replayed(sampler.config, sampler.prompts.ids, generator.headers[:counted], 4)

    broker.redis.flushall()
    generator, learner = NoopGenerator(broker), NoopLearner(broker, version=4)
    generator.version = 4
    sampler = start(sampler.config, broker)
    sampler.round()
    assert {name: sampler.state.tracker.counts(name) for name in before} == before
    assert committed_counts(broker) == before, "the restored values are in Redis too"
    drive(sampler, generator, learner)
    assert [batch.batch_id for batch in learner.batches] == [4, 5]
    assert [result["version"] for result in broker.evaluations()] == [0, 2, 4, 6]


def test_a_learner_that_repeats_steps_gets_no_batch_twice(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path)
    reach(sampler, generator, learner, 3)
    for version in (2, 3):  # back to a checkpoint of version 2, and the batch after it once more
        learner.inbox.announce(Step(version=version, drift=9.0))
    drive(sampler, generator, learner)
    each_task_once(broker, generator, learner, sampler.config)
    assert committed_counts(broker) == replayed(sampler.config, sampler.prompts.ids, generator.headers, 6)


def test_when_redis_goes_back_in_time_the_sampler_starts_again_from_it(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path)
    sampler.round()
    names = broker.redis.keys("*")
    then = {name: broker.redis.dump(name) for name in names}
    generator.work(4)
    sampler.round()
    broker.redis.flushall()
    for name, value in then.items():
        broker.redis.restore(name, 0, value)
    generator.headers.clear()
    generator.tasks.clear()
    generator.work(4)
    with pytest.raises(OutOfStep):
        sampler.round()
    assert not run_once(SteppingBack(sampler))
    drive(start(sampler.config, broker), generator, learner)
    each_task_once(broker, generator, learner, sampler.config)
    assert committed_counts(broker) == replayed(sampler.config, sampler.prompts.ids, generator.headers, 6)


class SteppingBack:
    """A sampler that finds Redis behind its own memory."""

    def __init__(self, sampler: Sampler) -> None:
        self.stop, self.metrics, self.timeline = sampler.stop, sampler.metrics, sampler.timeline

    def run(self) -> None:
        raise OutOfStep
