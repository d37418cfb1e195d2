"""Whole runs of the sampler on a real redis-server, with a generator and a learner that do no work."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.config import Config
from common.streams.broker import Broker
from common.streams.presence import Presence
from tests.support.sampler import NoopGenerator, NoopLearner, make_config, replayed, reward_of, write_prompts
from tests.support.sampler_driving import audited, committed_counts, drive, start, started


def recorded(folder: Path) -> EventAccumulator:
    """What TensorBoard has of the sampler."""
    return EventAccumulator(str(folder / "default/tensorboard/sampler"), size_guidance={"scalars": 0}).Reload()


def test_a_run_from_the_first_evaluation_to_the_last(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=5)
    drive(sampler, generator, learner)
    sampler.metrics.close()  # `run` opens them again
    sampler.run()
    assert broker.finished()
    audited(broker, sampler.config)
    assert committed_counts(broker) == replayed(sampler.config, sampler.prompts.ids, generator.headers, 6)

    assert [result["version"] for result in broker.evaluations()] == [0, 2, 4, 6]
    evaluated = [task for task in generator.tasks if task.kind == "eval"]
    assert Counter(task.min_version for task in evaluated) == {0: 5, 2: 5, 4: 5, 6: 5}
    assert generator.tasks[0].kind == "eval", "held-out prompts are asked before the first training prompt"
    last = broker.evaluations()[-1]
    rewards = [reward_of(task) for task in evaluated if task.min_version == 6]
    assert (last["accuracy"], last["samples"]) == (sum(rewards) / 5, 5)
    rows = [json.loads(line) for line in (tmp_path / "default/validation_data/6.jsonl").read_text().splitlines()]
    assert [(row["task_id"], row["input"], row["versions"]) for row in rows] == [
        (f"e6-{n}", f"heldout {n}", [6, 6]) for n in range(5)
    ]

    sampler.metrics.close()
    events = recorded(tmp_path)
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("validation/accuracy")] == [0, 2, 4, 6]
    assert {"tracker/drift_mean", "tracker/rho_mean", "tracker/n_eff_mean"} <= set(events.Tags()["scalars"])
    assert b"batch_size: 8" in events.Tensors("configuration")[0].tensor_proto.string_val[0]
    assert {"staleness/total", "staleness/in_flight", "staleness/in_queue"} <= set(events.Tags()["histograms"])
    assert sum(events.Histograms("staleness/total")[-1].histogram_value.bucket) == 8


def test_a_sampler_without_work_says_that_the_learner_is_gone(broker: Broker, tmp_path: Path) -> None:
    Presence(broker, "learner", "learner").beat()
    sampler, generator, _ = started(broker, tmp_path)
    broker.redis.zincrby(broker.key("alive"), -920_000, "learner")
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


def two_sources(folder: Path) -> Config:
    """Three tasks of `train` to each of `few`, and two held-out sets."""
    write_prompts(folder / "few.jsonl", "few", 4)
    few = str(folder / "few.jsonl")
    train = [
        {"path": str(folder / "train.jsonl"), "weight": 3},
        {"path": few, "system_prompt": "be brief", "episode": {"max_assistant_turns": 2}},
    ]
    heldout = [{"path": str(folder / "heldout.jsonl")}, {"path": few, "name": "old"}]
    return make_config(folder, heldout=2, data={"train": train, "heldout": heldout})


def test_each_source_gets_its_share_and_has_metrics_of_its_own(broker: Broker, tmp_path: Path) -> None:
    config = two_sources(tmp_path)
    generator, learner = NoopGenerator(broker), NoopLearner(broker, folder=config.run.folder)
    sampler = start(config, broker)
    drive(sampler, generator, learner)
    sampler.metrics.close()
    audited(broker, config)
    trained = [task for task in generator.tasks if task.kind == "train"]
    assert Counter(task.source for task in trained)["few"] == pytest.approx(len(trained) / 4, abs=2)
    assert all(task.prompt_id.startswith(f"{task.source}/") for task in generator.tasks)
    assert all(str(task.prompt).startswith(task.source) for task in trained)
    evaluated = Counter(task.source for task in generator.tasks if task.kind == "eval")
    assert evaluated == {"heldout": 2 * 4, "old": 4 * 4}, "every held-out prompt, at the start and at versions 2, 4, 6"
    events = recorded(tmp_path)
    for name in ("train", "few"):
        samples = {event.step: event.value for event in events.Scalars(f"source/{name}/samples")}
        means = {event.step: event.value for event in events.Scalars(f"source/{name}/reward")}
        rewards = [reward_of(task) for task in trained if task.source == name]
        assert sum(samples.values()) == len(rewards)
        assert sum(samples[step] * mean for step, mean in means.items()) == pytest.approx(sum(rewards))
