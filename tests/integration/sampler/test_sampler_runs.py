"""Whole runs of the sampler on a real redis-server, with a generator and a learner that do no work."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.streams.broker import Broker
from common.streams.presence import Presence
from sampler.advantages import normalize
from tests.support.sampler import NoopGenerator, NoopLearner, make_config, replayed, reward_of
from tests.support.sampler_driving import committed_counts, drive, each_task_once, start, started

pytestmark = pytest.mark.integration


def test_a_run_from_the_first_evaluation_to_the_last(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=5)
    drive(sampler, generator, learner)
    sampler.run()
    assert broker.finished()
    each_task_once(broker, generator, learner, sampler.config)
    assert committed_counts(broker) == replayed(sampler.config, sampler.prompts.ids, generator.headers, 6)

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


def test_a_sampler_without_work_says_that_the_learner_is_gone(broker: Broker, tmp_path: Path) -> None:
    config, generator, learner = make_config(tmp_path), NoopGenerator(broker), NoopLearner(broker)
    Presence(broker, "learner", "learner").beat()
    broker.redis.zincrby(broker.key("alive"), -920_000, "learner")
    sampler = start(config, broker)
    with capture_logs() as logs:
        sampler.round()
        sampler.report(now=True)
        assert not any("gone" in line["event"] for line in logs), "tasks are on their way"
        while sampler.state.admission.in_flight:
            generator.work()
            sampler.round()
        sampler.report(now=True)
    (line,) = [line["event"] for line in logs if "gone" in line["event"]]
    assert line.startswith("the learner has been gone for 92")
    assert learner.version == 0


def test_batches_carry_the_advantage_over_the_value_before_the_reward(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, prompts=3)
    expected = {}
    original = sampler.state.tracker.update

    def spy(prompt_id: str, reward: float, kl: float = 0.0, rho: float | None = None) -> float:
        before = sampler.state.tracker.value(prompt_id)
        assert original(prompt_id, reward, kl, rho) == before
        expected[f"t{len(expected):07d}"] = reward - before
        return before

    sampler.state.tracker.update = spy  # type: ignore[method-assign]
    drive(sampler, generator, learner)
    for batch in learner.batches:
        raw = [expected[sample_id] for sample_id in batch.sample_ids]
        assert batch.advantages == pytest.approx(normalize(np.array(raw)).tolist())
        assert batch.rewards == [reward_of(t) for s in batch.sample_ids for t in generator.tasks if t.task_id == s]


def test_outstanding_never_exceeds_the_bound(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, sampler={"batch_size": 4, "max_staleness": 2})
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
        assert sampler.state.tracker.counts(sampler.prompts.ids[0])[0] == pytest.approx(alpha)
        del learner


def test_metrics_of_each_batch_reach_tensorboard(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=2)
    drive(sampler, generator, learner)
    sampler.metrics.close()
    events = EventAccumulator(str(tmp_path / "default/tensorboard/sampler"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("validation/accuracy")] == [0, 2, 4, 6]
    assert {"tracker/drift_mean", "tracker/rho_mean", "tracker/n_eff_mean"} <= set(events.Tags()["scalars"])
    assert b"batch_size: 8" in events.Tensors("configuration")[0].tensor_proto.string_val[0]
    assert {"staleness/total", "staleness/in_flight", "staleness/in_queue"} <= set(events.Tags()["histograms"])
    ages = sum(events.Histograms("staleness/total")[-1].histogram_value.bucket)
    assert ages == sampler.config.sampler.batch_size
