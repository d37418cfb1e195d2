"""A deterministic run of the sampler: neither the order of answers nor a restart changes what it decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import Config
from common.files import tracker_path
from common.messages import Step, Task
from common.streams.broker import Broker
from sampler.values import selection, tracker
from tests.support.sampler import NoopGenerator, NoopLearner, make_config, reward_of
from tests.support.sampler_driving import start
from tests.support.sampler_memory import MemoryRun

STEPS, BATCH = 4, 12


def make(folder: Path, prompts: int, heldout: int = 0, **sections: Any) -> Config:
    return make_config(
        folder,
        prompts=prompts,
        heldout=heldout,
        **{
            "run": {"steps": STEPS, "deterministic": True},
            "sampler": {"batch_size": BATCH, "max_staleness": 0},
            "episode": {"rollouts_every": 0},
            **sections,
        },
    )


def decisions(config: Config, seed: int, restarts: bool) -> tuple[Any, ...]:
    """Tasks, batches and values of a run whose tasks are answered in an order drawn from a seed, one a round."""
    rng = np.random.default_rng(seed)
    run = MemoryRun(config)
    run.steps.append(Step(version=0))
    sampler, sent = run.sampler(), dict[str, Task]()
    while not sampler.over():
        sampler.round()
        sent |= run.tasks
        if run.tasks:
            task = run.tasks[rng.choice(list(run.tasks))]
            version = task.min_version
            run.answer(task.task_id, reward=reward_of(task), oldest_version=version, newest_version=version)
        elif len(run.steps) <= len(run.batches):
            run.train()
        if restarts and rng.random() < 0.3:
            sampler = run.sampler()
    tracker = sampler.state.tracker
    rows = [tracker.row(i) for i in range(len(tracker.prompt_ids))]
    population = tracker.population.pack() if tracker.population else b""
    return sent, [batch.model_dump() for batch in run.batches], rows, population


METHODS = {
    "spo, many prompts": {"prompts": 400, "sampler": {"selection": {"criterion": "thompson"}}},
    "rloo": {"algorithm": {"method": "rloo", "group_size": 4, "refill_degenerate": True}},
}


@pytest.mark.parametrize("method", METHODS)
def test_neither_the_order_of_answers_nor_restarts_change_a_run(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (selection, tracker):
        monkeypatch.setattr(module, "SMALL_POOL", 100)
    sections: dict[str, Any] = {"prompts": 30, **METHODS[method]}
    sections["sampler"] = {"batch_size": BATCH, "max_staleness": 0} | sections.get("sampler", {})
    config = make(tmp_path, **sections)
    undisturbed = decisions(config, seed=0, restarts=False)
    assert len(undisturbed[1]) == STEPS
    for seed in (1, 2):
        assert decisions(config, seed, restarts=True) == undisturbed


def test_each_task_of_each_run_has_a_seed_of_its_own(tmp_path: Path) -> None:
    run = {"steps": STEPS, "deterministic": True}
    sent, *_ = decisions(make(tmp_path, 30, run=run), seed=0, restarts=False)
    others, *_ = decisions(make(tmp_path, 30, run=run | {"seed": 1}), seed=0, restarts=False)
    seeds = {task.seed for task in (*sent.values(), *others.values())}
    assert len(seeds) == len(sent) + len(others)
    assert None not in seeds


def test_an_evaluation_that_starts_again_has_the_same_seeds(fake_broker: Broker, tmp_path: Path) -> None:
    sampler, generator = start(make(tmp_path, 30, heldout=5), fake_broker), NoopGenerator(fake_broker)
    NoopLearner(fake_broker)
    sampler.round()
    assert [task.evaluation for task in sampler.state.admission.in_flight.values()] == [1] * 5, "training waits for it"
    assert generator.work(oldest_version=0, newest_version=1) == 5  # by two versions: so it starts again
    sampler.round()
    assert generator.work() == 5
    first, second = generator.tasks[:5], generator.tasks[5:]
    assert [task.seed for task in first] == [task.seed for task in second]
    assert len({task.seed for task in first} - {None}) == 5
    assert not {task.task_id for task in first} & {task.task_id for task in second}


def test_an_evaluation_does_not_depend_on_answers_order(fake_broker: Broker, tmp_path: Path) -> None:
    config = make(tmp_path, 30, heldout=10, run={"steps": 1, "deterministic": True})
    sampler, generator, learner = start(config, fake_broker), NoopGenerator(fake_broker), NoopLearner(fake_broker)

    def answer_evaluation(order: slice) -> None:
        for delivery in generator.inbox.lease(generator.loaded, 10, 0).deliveries[order]:
            generator.finish([delivery], reward=0.1 * (1 + int(delivery.task.task_id.rpartition("-")[2])))
        sampler.round()

    sampler.round()
    answer_evaluation(slice(None))
    while sampler.state.version < 1:
        generator.work()
        learner.work()
        sampler.round()
    generator.loaded = 1
    answer_evaluation(slice(None, None, -1))
    first, second = fake_broker.evaluations()
    assert [first["version"], second["version"]] == [0, 1]
    assert first["reward"] == second["reward"]
    assert first["accuracy"] == 0.1, "a part of the reward is no correct answer"


def test_a_version_announced_again_leaves_its_saved_state(fake_broker: Broker, tmp_path: Path) -> None:
    config = make(tmp_path, 30)
    sampler, generator, learner = start(config, fake_broker), NoopGenerator(fake_broker), NoopLearner(fake_broker)
    while learner.version < 1:
        sampler.round()
        generator.work()
        learner.work(checkpoint=True)
    sampler.round()
    saved = tracker_path(config.run.folder, 1).read_bytes()
    generator.version = 1
    generator.work()
    sampler.round()
    # A learner that was killed while it saved has trained on the batch once more.
    learner.inbox.announce(Step(version=1, checkpoint=True))
    sampler.round()
    assert tracker_path(config.run.folder, 1).read_bytes() == saved
