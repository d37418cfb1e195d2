"""Runs on several sources: their shares of the tasks, also over restarts, and their metrics."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.config import Config
from common.messages import SampleHeader
from common.streams.broker import Broker
from tests.support.sampler import NoopGenerator, NoopLearner, make_config, replayed, reward_of, write_prompts
from tests.support.sampler_driving import committed_counts, drive, each_task_once, start

pytestmark = pytest.mark.integration


def two_sources(folder: Path) -> Config:
    """Three tasks of `train` to each of `few`, and two held-out sets."""
    write_prompts(folder / "few.jsonl", "few", 4)
    train: list[dict[str, Any]] = [
        {"path": str(folder / "train.jsonl"), "weight": 3},
        {"path": str(folder / "few.jsonl"), "system_prompt": "be brief", "episode": {"reward": "boxed"}},
    ]
    heldout = [{"path": str(folder / "heldout.jsonl")}, {"path": str(folder / "few.jsonl"), "name": "old"}]
    return make_config(folder, heldout=2, data={"train": train, "heldout": heldout})


def test_each_source_gets_its_share_and_has_metrics_of_its_own(broker: Broker, tmp_path: Path) -> None:
    config = two_sources(tmp_path)
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    sampler = start(config, broker)
    drive(sampler, generator, learner)
    sampler.metrics.close()
    each_task_once(broker, generator, learner, config)
    trained = [task for task in generator.tasks if task.kind == "train"]
    counts = Counter(task.source for task in trained)
    assert counts["few"] == pytest.approx(len(trained) / 4, abs=2)
    assert all(task.prompt_id.startswith(f"{task.source}/") for task in generator.tasks)
    assert all(str(task.prompt).startswith(task.source) for task in trained)
    evaluated = Counter(task.source for task in generator.tasks if task.kind == "eval")
    assert evaluated == {"heldout": 2 * 4, "old": 4 * 4}, "every held-out prompt, at the start and at versions 2, 4, 6"
    events = EventAccumulator(str(tmp_path / "default" / "tensorboard" / "sampler"))
    events.Reload()
    for name in ("train", "few"):
        samples = {event.step: event.value for event in events.Scalars(f"source/{name}/samples")}
        means = {event.step: event.value for event in events.Scalars(f"source/{name}/reward")}
        rewards = [reward_of(task) for task in trained if task.source == name]
        assert sum(samples.values()) == len(rewards)
        assert sum(samples[step] * mean for step, mean in means.items()) == pytest.approx(sum(rewards))


def test_a_sampler_that_is_started_again_keeps_to_the_shares(broker: Broker, tmp_path: Path) -> None:
    config, rng = two_sources(tmp_path), random.Random(3)
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    finished = False
    while not finished:
        sampler = start(config, broker)
        # It ends without a word, and what it noted since its last commit is gone.
        for _ in range(rng.randrange(1, 4)):
            sampler.round()
            finished = sampler.over()
            generator.work(rng.randrange(1, 10))
            if learner.work():
                generator.version = learner.version
        sampler.ledger.release()
        sampler.metrics.close()
    each_task_once(broker, generator, learner, config)
    tasks = sorted((task for task in generator.tasks if task.kind == "train"), key=lambda task: task.task_id)
    sources = sampler.mixture.sources(0, len(tasks), sampler.state.tracker.retired)
    assert [task.source for task in tasks] == [("train", "few")[source] for source in sources]
    headers: list[SampleHeader] = generator.headers
    assert committed_counts(broker) == replayed(config, sampler.prompts.ids, headers, 6)
