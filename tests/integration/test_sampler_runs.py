"""Whole runs of the sampler on a real redis-server, with a generator and a learner that do no work."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.config import Config
from common.errors import UserError
from common.messages import SampleHeader, Step
from common.streams.broker import Broker
from common.streams.ledger import Commit, OutOfStep, SamplerLedger
from common.streams.presence import Presence
from sampler.advantages import normalize
from sampler.cli import load_data, run_once
from sampler.loop import Sampler
from sampler.state import Row
from tests.sampler_tools import NoopGenerator, NoopLearner, make_config, replayed, reward_of

pytestmark = pytest.mark.integration
LOG = structlog.get_logger()


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


@pytest.fixture
def broker(real_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Broker:
    monkeypatch.setattr("sampler.loop.BLOCK_MS", 1)
    monkeypatch.setattr("sampler.loop.IDLE_MS", 1)
    real_broker.dead_after = 30.0
    return real_broker


def start(config: Config, broker: Broker, ledger: SamplerLedger | None = None) -> Sampler:
    prompts, heldout = load_data(config, LOG)
    ledger = ledger or SamplerLedger(broker, "sampler under test")
    sampler = Sampler(config, broker, ledger, prompts, heldout, Presence(broker, "sampler", "sampler"), LOG)
    sampler.begin()
    return sampler


def drive(sampler: Sampler, generator: NoopGenerator, learner: NoopLearner, rounds: int = 1000) -> None:
    """Take turns until the run is over."""
    for _ in range(rounds):
        sampler.round()
        if sampler.over():
            return
        generator.work()
        if learner.work():
            generator.version = learner.version
    raise AssertionError("the run did not end")


def committed_counts(broker: Broker) -> dict[str, tuple[float, float]]:
    rows = broker.redis.hgetall(broker.key("tracker"))
    return {name.decode(): (Row.unpack(data).alpha, Row.unpack(data).beta) for name, data in rows.items()}


def each_task_once(broker: Broker, generator: NoopGenerator, learner: NoopLearner, config: Config) -> None:
    counters = broker.counters()
    assert counters["dispatched"] == counters["counted"] == len(generator.headers)
    assert counters["rewarded"] == sum(header.kind == "train" for header in generator.headers)
    trained = [sample_id for batch in learner.batches for sample_id in batch.sample_ids]
    assert len(trained) == len(set(trained)) == config.run.steps * config.sampler.batch_size
    for name in ("outstanding", "open"):
        assert broker.redis.hlen(broker.key(name)) == 0
    assert broker.redis.xlen(broker.key("samples")) == 0
    assert broker.redis.keys(broker.key("payload:") + "*") == [], "no payload is left behind"


def test_a_run_from_the_first_evaluation_to_the_last(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path, heldout=5)
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    sampler = start(config, broker)
    drive(sampler, generator, learner)
    sampler.run()
    assert broker.finished()
    each_task_once(broker, generator, learner, config)
    assert committed_counts(broker) == replayed(config, sampler.prompts.ids, generator.headers, 6)

    assert [result["version"] for result in broker.evaluations()] == [0, 2, 4, 6]
    evaluated = [task for task in generator.tasks if task.kind == "eval"]
    assert Counter(task.min_version for task in evaluated) == {0: 5, 2: 5, 4: 5, 6: 5}
    assert generator.tasks[0].kind == "eval", "held-out prompts are asked before the first training prompt"
    last = broker.evaluations()[-1]
    rewards = [reward_of(task) for task in evaluated if task.min_version == 6]
    assert (last["accuracy"], last["samples"]) == (sum(rewards) / 5, 5)
    rows = [json.loads(line) for line in (tmp_path / "default/validation_data/6.jsonl").read_text().splitlines()]
    assert [row["task_id"] for row in rows] == [f"e6-{n}" for n in range(5)]
    assert rows[0]["input"] == "heldout 0"
    assert rows[0]["versions"] == [6, 6]


def test_batches_carry_the_advantage_over_the_value_before_the_reward(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path, prompts=3)
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    sampler = start(config, broker)
    expected = {}
    original = sampler.tracker.update

    def spy(prompt_id: str, reward: float, kl: float = 0.0, rho: float | None = None) -> float:
        before = sampler.tracker.value(prompt_id)
        assert original(prompt_id, reward, kl, rho) == before
        expected[f"t{len(expected):07d}"] = reward - before
        return before

    sampler.tracker.update = spy  # type: ignore[method-assign]
    drive(sampler, generator, learner)
    for batch in learner.batches:
        raw = [expected[sample_id] for sample_id in batch.sample_ids]
        assert batch.advantages == pytest.approx(normalize(np.array(raw)).tolist())
        assert batch.rewards == [reward_of(t) for s in batch.sample_ids for t in generator.tasks if t.task_id == s]


@pytest.mark.parametrize("seed", range(6))
def test_killed_anywhere_it_counts_each_task_once_and_ends_with_the_same_tracker(
    broker: Broker, tmp_path: Path, seed: int
) -> None:
    # Fewer prompts than tasks in flight.
    config = make_config(tmp_path, prompts=5, heldout=3, episode={"rollouts_every": 3})
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
    assert [result["version"] for result in broker.evaluations()] == [0, 2, 4, 6]
    for version in (0, 2, 4, 6):
        lines = (tmp_path / f"default/validation_data/{version}.jsonl").read_text().splitlines()
        assert [json.loads(line)["task_id"] for line in lines] == [f"e{version}-{n}" for n in range(3)]
    assert kept_rollouts(tmp_path) == [task.task_id for task in generator.tasks if task.keep]
    assert {task.version for task in generator.tasks if task.keep} == {0, 3}


def kept_rollouts(folder: Path) -> list[str]:
    """Task ids of all rollouts, in the order of dispatch; each must lie in its version's file."""
    found = []
    for path in (folder / "default/rollouts").glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert {row["version"] for row in rows} == {int(path.stem)}
        found += [row["task_id"] for row in rows]
    return sorted(found)


def test_what_is_set_aside_is_replaced_and_retired_prompts_do_not_come_back(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path, heldout=2)
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    sampler = start(config, broker)
    sampler.round()
    sampler.round()
    generator.work(4, status="set_aside", reason="sandbox failed")
    generator.work(3, status="set_aside", reason="too long", retire=True)
    retired = {header.prompt_id for header in generator.headers[4:7]}
    assert len(retired) == 3
    seen = len(generator.headers)
    in_flight = set(sampler.admission.in_flight)
    drive(sampler, generator, learner)
    counters = broker.counters()
    assert counters["dispatched"] == counters["counted"]
    assert (counters["set_aside"], counters["retired"]) == (5, 3), "two of the seven were held-out answers"
    assert counters["rewarded"] == 48
    later = [header for header in generator.headers[seen:] if header.task_id not in in_flight]
    assert not retired.intersection(header.prompt_id for header in later)
    assert broker.evaluations()[0]["set_aside"] == 2
    assert broker.evaluations()[0]["samples"] == 0
    again = start(config, broker)
    assert {again.tracker.prompt_ids[i] for i in again.tracker.retired.nonzero()[0]} == retired


def test_a_late_sample_informs_the_tracker_and_another_takes_its_place(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    sampler = start(config, broker)
    while learner.version < 3:
        sampler.round()
        generator.work()
        if learner.work():
            generator.version = learner.version
    sampler.round()
    generator.work(1, oldest_version=0)
    late = generator.headers[-1]
    drive(sampler, generator, learner)
    assert broker.counters()["late"] == 1
    assert broker.counters()["rewarded"] == 49
    assert late.task_id not in [sample_id for batch in learner.batches for sample_id in batch.sample_ids]
    each_task_once(broker, generator, learner, config)
    assert committed_counts(broker) == replayed(config, sampler.prompts.ids, generator.headers, 6)


def test_outstanding_never_exceeds_the_bound(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path, sampler={"batch_size": 4, "max_staleness": 2})
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    sampler = start(config, broker)
    for _ in range(10):
        sampler.round()
        generator.work(1)
    assert broker.redis.hlen(broker.key("outstanding")) + broker.redis.hlen(broker.key("open")) <= 12
    while generator.work():
        pass
    sampler.round()
    assert broker.counters()["dispatched"] == 12, "without a learner nothing more is sent"
    learner.work()
    sampler.round()
    assert broker.counters()["dispatched"] == 16


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


def test_rescored_drift_and_constant_rho_reach_the_tracker(broker: Broker, tmp_path: Path) -> None:
    for mode, drift, rho in (("rescore", 0.006, 2 ** (-0.1)), ("constant", 0.5, 0.7)):
        broker.redis.flushall()
        sampler_config: dict[str, Any] = {"batch_size": 2, "max_staleness": 0, "drift": {"mode": mode, "rho": 0.7}}
        config = make_config(tmp_path, prompts=1, run={"steps": 2}, sampler=sampler_config)
        generator, learner = NoopGenerator(broker), NoopLearner(broker)
        sampler = start(config, broker)
        sampler.round()
        generator.work(1, reward=1.0)
        generator.work(1, reward=1.0, drift=drift)
        sampler.round()
        first = 0.96 if mode == "rescore" else 0.7
        alpha = rho * (first * 0.5 + 1) + 1
        assert sampler.tracker.counts(sampler.prompts.ids[0])[0] == pytest.approx(alpha)
        del learner


def test_a_reward_outside_the_declared_range_stops_the_run_with_one_line(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    generator, _ = NoopGenerator(broker), NoopLearner(broker)
    sampler = start(config, broker)
    sampler.round()
    generator.work(1, reward=7.0)
    with pytest.raises(UserError, match=r"reward 7.0 is outside sampler.tracker.reward_range \[0.0, 1.0\]"):
        sampler.round()
    assert broker.counters()["counted"] == 0, "the sample is still there"


def test_no_prompt_that_can_be_answered_is_one_clear_line(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path, prompts=2, sampler={"batch_size": 2})
    generator, _ = NoopGenerator(broker), NoopLearner(broker)
    sampler = start(config, broker)
    sampler.round()
    generator.work(4, status="set_aside", reason="prompt has 99 tokens", retire=True)
    with pytest.raises(UserError, match=r"no prompt of .*train.jsonl can be answered; .*99 tokens"):
        sampler.round()


def test_headers_of_unknown_tasks_are_acknowledged_and_change_nothing(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    sampler = start(config, broker)
    for kind in ("values", "train"):
        header = SampleHeader(task_id=f"stranger-{kind}", prompt_id=sampler.prompts.ids[0], kind=kind, reward=1.0)
        broker.redis.xadd(broker.key("samples"), {"id": header.task_id, "header": header.pack()})
    broker.redis.xadd(broker.key("samples"), {"header": b"rubbish"})
    drive(sampler, generator, learner)
    assert broker.counters()["ignored"] == 2
    assert broker.counters()["dead"] == 1
    assert committed_counts(broker) == replayed(config, sampler.prompts.ids, generator.headers, 6)


def test_without_redis_state_it_resumes_from_the_tracker_checkpoint(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path, heldout=2)
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    sampler = start(config, broker)
    while learner.version < 4:
        sampler.round()
        generator.work()
        if learner.work(checkpoint=learner.version == 3):
            generator.version = learner.version
    counted = broker.counters()["counted"]
    sampler.round()  # sees the step, and writes what was counted until then
    assert (tmp_path / "default/checkpoints/tracker/step_4.npz").is_file()
    before = replayed(config, sampler.prompts.ids, generator.headers[:counted], 4)

    broker.redis.flushall()
    generator, learner = NoopGenerator(broker), NoopLearner(broker, version=4)
    generator.version = 4
    sampler = start(config, broker)
    sampler.round()
    assert {name: sampler.tracker.counts(name) for name in before} == before
    assert committed_counts(broker) == before, "the restored values are in Redis too"
    drive(sampler, generator, learner)
    assert [batch.batch_id for batch in learner.batches] == [4, 5]
    assert [result["version"] for result in broker.evaluations()] == [4, 6]


def test_a_learner_that_repeats_steps_gets_no_batch_twice(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    sampler = start(config, broker)
    while learner.version < 3:
        sampler.round()
        generator.work()
        if learner.work():
            generator.version = learner.version
    for version in (2, 3):  # back to a checkpoint of version 2, and the batch after it once more
        learner.inbox.announce(Step(version=version, batch_id=version - 1, drift=9.0))
    drive(sampler, generator, learner)
    each_task_once(broker, generator, learner, config)
    assert committed_counts(broker) == replayed(config, sampler.prompts.ids, generator.headers, 6)


def test_when_redis_goes_back_in_time_the_sampler_starts_again_from_it(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    sampler = start(config, broker)
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
    assert not run_once(lambda: SteppingBack(sampler))
    drive(start(config, broker), generator, learner)
    each_task_once(broker, generator, learner, config)
    assert committed_counts(broker) == replayed(config, sampler.prompts.ids, generator.headers, 6)


class SteppingBack:
    """A sampler that finds Redis behind its own memory."""

    def __init__(self, sampler: Sampler) -> None:
        self.stop, self.writer = sampler.stop, sampler.writer

    def run(self) -> None:
        raise OutOfStep


def test_metrics_of_each_batch_reach_tensorboard(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path, heldout=2)
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    sampler = start(config, broker)
    drive(sampler, generator, learner)
    sampler.writer.close()
    events = EventAccumulator(str(tmp_path / "default/tensorboard/sampler"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [0, 1, 2, 3, 4, 5]
    assert [event.step for event in events.Scalars("heldout/accuracy")] == [0, 2, 4, 6]
    assert {"staleness/mean", "tracker/drift_mean", "tracker/rho_mean", "tracker/n_eff_mean"} <= set(
        events.Tags()["scalars"]
    )
    assert {"staleness/total", "staleness/in_flight", "staleness/in_queue"} <= set(events.Tags()["histograms"])
    ages = sum(events.Histograms("staleness/total")[-1].histogram_value.bucket)
    assert ages == config.sampler.batch_size
