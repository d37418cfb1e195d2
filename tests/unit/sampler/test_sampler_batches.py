"""Runs in memory: batches hold whole groups, young enough; deterministic ones depend on neither order nor restarts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import Config, SamplerConfig
from common.files import tracker_path
from common.messages import Batch, Step, Task
from common.streams.broker import Broker
from sampler import tracker
from sampler.admission import Admission
from sampler.batches import OpenBatch
from sampler.loop import MAX_REPLACEMENTS, Sampler
from sampler.records import DispatchedTask, OpenSample
from sampler.values import selection
from tests.support.sampler import NoopGenerator, NoopLearner, make_config, reward_of
from tests.support.sampler_driving import start, summary
from tests.support.sampler_memory import MemoryRun


def make(folder: Path, groups: int, size: int, staleness: int, steps: int, prompts: int = 30, **method: Any) -> Config:
    return make_config(
        folder,
        prompts=prompts,
        run={"steps": steps},
        sampler={"batch_size": groups * size, "max_staleness": staleness, "max_set_aside": 10_000},
        algorithm={"method": "grpo" if size > 1 else "spo", "group_size": max(size, 2), **method},
        episode={"rollouts_every": 0},
    )


@pytest.fixture(scope="module", autouse=True)
def one_refill() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sampler.state.REFILL_LIMIT", 1)
        yield


def begun(config: Config) -> tuple[MemoryRun, Sampler]:
    run = MemoryRun(config)
    run.steps.append(Step(version=0))
    sampler = run.sampler()
    sampler.round()
    return run, sampler


def groups_of(run: MemoryRun, batch: Batch) -> list[list[str]]:
    """Sample ids by prompt, which may be there with more than one group."""
    by_prompt: dict[str, list[str]] = {}
    for sample_id in batch.sample_ids:
        by_prompt.setdefault(run.answered[sample_id].prompt_id, []).append(sample_id)
    return list(by_prompt.values())


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.integers(1, 6)),
    seed=st.integers(0, 10_000),
    failing=st.sampled_from([0.0, 0.1, 0.4]),
    slow=st.sampled_from([0.0, 0.3]),
    lagging=st.booleans(),
    refill=st.booleans(),
)
@settings(max_examples=25)
def test_no_sample_is_too_old_and_no_group_incomplete(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, int, int, int], seed: int, failing: float, slow: float,
    lagging: bool, refill: bool,
) -> None:  # fmt: skip
    rng, (groups, size, staleness, steps) = np.random.default_rng(seed), shape
    folder = tmp_path_factory.mktemp("example")
    config = make(folder, groups, size, staleness, steps, refill_degenerate=refill and size > 1)
    run, sampler = begun(config)
    batch_size, checked = config.sampler.batch_size, 0
    dispatched_at = dict.fromkeys(run.tasks, 0)
    stragglers: set[str] = set()
    for _ in range(200 * steps * batch_size):
        if sampler.over():
            break
        quick = [task_id for task_id in run.tasks if task_id not in stragglers] or list(run.tasks)
        for task_id in rng.permutation(quick)[: rng.integers(0, 6)].tolist():
            if rng.random() < failing:
                run.answer(task_id, status="set_aside", reason="the sandbox failed", retire=rng.random() < 0.05)
            else:
                newest = len(run.steps) - 1
                oldest = run.tasks[task_id].min_version if lagging else dispatched_at[task_id]
                version = int(rng.integers(oldest, newest + 1))
                reward = float(rng.integers(0, 2))
                run.answer(task_id, reward=reward, oldest_version=version, newest_version=newest)
        if rng.random() < 0.5 and len(run.steps) <= len(run.batches):
            run.train()
        sampler.round()
        for task_id in run.tasks:
            if task_id not in dispatched_at:
                dispatched_at[task_id] = sampler.state.version
                stragglers |= {task_id} if rng.random() < slow else set()
        assert sampler.state.outstanding <= (staleness + 1) * batch_size
        for batch in run.batches[checked:]:
            assert len(batch.sample_ids) == batch_size
            assert all(batch.batch_id - run.answered[s].oldest_version <= staleness for s in batch.sample_ids)
            assert all(len(group) % size == 0 for group in groups_of(run, batch))
        checked = len(run.batches)
        if rng.random() < 0.1:
            before = summary(sampler.state)
            sampler = run.sampler()
            assert summary(sampler.state) == before, "a successor goes on where the last commit left the run"
    assert sampler.over(), "the run ended"
    trained = [sample_id for batch in run.batches for sample_id in batch.sample_ids]
    assert len(trained) == len(set(trained)) == steps * batch_size
    counters = run.counters
    left = sum(counters[name] for name in ("late", "abandoned", "refilled"))
    assert counters["rewarded"] == sum(h.status == "ok" for h in run.answered.values()) == len(trained) + left
    assert run.state.open == run.state.outstanding == {}
    assert run.payloads == set(), "no payload is left behind"
    if not (failing or lagging):
        assert counters["late"] == counters["abandoned"] == 0
        assert counters["rewarded"] == len(trained) + counters["refilled"], "no task too many"


def answer_all(run: MemoryRun, rewards: list[float], version: int = 0) -> None:
    for task_id, reward in zip(list(run.tasks), rewards, strict=True):
        run.answer(task_id, reward=reward, oldest_version=version, newest_version=version)


def test_a_group_is_asked_at_once(tmp_path: Path) -> None:
    run, _ = begun(make(tmp_path, groups=3, size=4, staleness=1, steps=100, prompts=6))
    asked = [task.prompt_id for task in run.tasks.values()]
    assert sorted(Counter(asked).values()) == [4] * 6
    assert asked == sorted(asked, key=asked.index), "those of a group follow one another"


def test_a_skipped_member_is_replaced_by_the_same_prompt(tmp_path: Path) -> None:
    run, sampler = begun(make(tmp_path, groups=1, size=3, staleness=0, steps=2))
    first, second, third = run.tasks
    prompt = run.tasks[first].prompt_id
    run.answer(first, reward=1.0)
    run.answer(second, status="set_aside", reason="the sandbox failed")
    run.answer(third, reward=0.0)
    sampler.round()
    assert run.batches == [], "two of three are no group"
    ((task_id, task),) = run.tasks.items()
    assert task.prompt_id == prompt
    run.answer(task_id, reward=0.0)
    sampler.round()
    assert run.batches[0].sample_ids == [first, third, task_id]
    assert run.batches[0].advantages == pytest.approx([1.1547, -0.57735, -0.57735], abs=1e-4)
    assert run.counters["set_aside"] == 1


def test_a_group_whose_member_keeps_failing_is_given_up(tmp_path: Path) -> None:
    run, sampler = begun(make(tmp_path, groups=1, size=3, staleness=0, steps=1))
    first, second, third = run.tasks
    prompt = run.tasks[first].prompt_id
    run.answer(first, reward=1.0)
    run.answer(second, status="set_aside", reason="the sandbox failed")
    for _ in range(MAX_REPLACEMENTS):
        sampler.round()
        (newest,) = set(run.tasks) - {third}
        run.answer(newest, status="set_aside", reason="the sandbox failed")
    sampler.round()
    assert run.counters["abandoned"] == 1, "the first answer has no other left to be compared with"
    assert set(run.tasks) == {third}, "what is in flight keeps its room"
    sampler = run.sampler()  # a successor knows that the group was given up
    run.answer(third, reward=1.0)
    sampler.round()
    assert run.counters["abandoned"] == 2
    assert run.counters["rewarded"] == 2, "both informed the tracker"
    assert {task.prompt_id for task in run.tasks.values()} != {prompt}
    answer_all(run, [1.0, 0.0, 0.0])
    sampler.round()
    assert len(run.batches) == 1
    assert run.payloads == set(run.batches[0].sample_ids)


def test_a_retired_prompt_takes_its_group_along(tmp_path: Path) -> None:
    run, sampler = begun(make(tmp_path, groups=2, size=2, staleness=0, steps=1))
    for task_id in list(run.tasks)[:2]:
        run.answer(task_id, status="set_aside", reason="prompt has 99 tokens", retire=True)
    sampler.round()
    assert run.counters["retired"] == 1
    assert run.answered[task_id].prompt_id not in {task.prompt_id for task in run.tasks.values()}
    assert len(run.tasks) == 4


@pytest.mark.parametrize("refill", [False, True])
def test_degenerate_groups_are_replaced_up_to_the_limit(tmp_path: Path, refill: bool) -> None:
    config = make(tmp_path, groups=2, size=2, staleness=0, steps=3, refill_degenerate=refill)
    run, sampler = begun(config)
    answer_all(run, [1.0, 1.0, 1.0, 0.0])
    sampler.round()
    assert (run.counters["grouped"], run.counters["degenerate"]) == (4, 2)
    if not refill:
        assert run.batches[0].advantages[:2] == [0.0, 0.0]
        assert (run.metrics[1]["group/degenerate"], run.metrics[1]["advantage/zero"]) == (0.5, 0.5)
        run.train()
        sampler.round()
        answer_all(run, [1.0, 0.0, 1.0, 0.0], version=1)
        sampler.round()
        assert (run.metrics[2]["group/degenerate"], run.metrics[2]["advantage/zero"]) == (0.0, 0.0)
        return
    assert run.batches == []
    assert run.counters["refilled"] == 2
    assert len(run.payloads) == 2
    sampler = run.sampler()
    answer_all(run, [0.0, 0.0])
    sampler.round()
    answer_all(run, [1.0, 1.0])  # the third: a batch's worth has been replaced already
    sampler.round()
    assert run.counters["refilled"] == 4
    assert sorted(run.batches[0].advantages)[1:3] == [0.0, 0.0]
    run.train()
    sampler.round()
    answer_all(run, [1.0, 1.0, 1.0, 0.0])
    sampler.round()
    assert run.counters["refilled"] == 6, "each batch has a limit of its own"


def waiting_samples(config: SamplerConfig, *oldest: int, next_id: int) -> OpenBatch:
    """Samples that wait for a batch, by the versions of their oldest tokens."""
    waiting = OpenBatch(config, next_id=next_id)
    for arrival, version in enumerate(oldest):
        waiting.add(OpenSample(f"s{arrival}", arrival, 0.0, float(arrival), 8, 8, version, version))
    return waiting


def test_a_batch_takes_the_oldest_and_lists_as_they_came() -> None:
    waiting = waiting_samples(SamplerConfig(batch_size=2, max_staleness=4), 4, 3, 2, next_id=4)
    closed = waiting.take_next()
    assert closed.manifest.sample_ids == [sample.sample_id for sample in closed.samples] == ["s1", "s2"]
    assert closed.manifest.advantages == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert [sample.sample_id for sample in waiting.samples()] == ["s0"]
    assert waiting.next_id == 5


def test_a_batch_names_rows_where_a_sample_has_several() -> None:
    waiting = waiting_samples(SamplerConfig(batch_size=2), 0, 0, 0, 0, next_id=0)
    (last,) = waiting.groups["s3"]
    last.row_tokens = [3, 5]
    assert [waiting.take_next().manifest.row_tokens for _ in range(2)] == [None, [[], [3, 5]]]


def test_a_late_sample_leaves_and_makes_room_for_another() -> None:
    config = SamplerConfig(batch_size=2, max_staleness=1)
    admission, waiting = Admission(config, 10), waiting_samples(config, 1, 2, next_id=3)
    assert admission.room(3, 3, len(waiting)) == 2
    assert [late.sample_id for late in waiting.drop_late()] == ["s0"]
    assert not waiting.full()
    assert admission.room(3, 3, len(waiting)) == 3
    positions = [admission.min_version(position) for position in (0, 3, 4, 7)]
    assert positions == [0, 0, 1, 2], "version b trains on batch b"


def test_evaluation_takes_no_room_of_training() -> None:
    admission = Admission(SamplerConfig(batch_size=4, max_staleness=0), 2, index={"w": 0, "x": 1})
    admission.add("e0-0", DispatchedTask("w", True, 0, 0.0))
    assert admission.room(0, 0, 0) == 4
    assert not admission.must_wait(5, Counter())
    assert [admission.remove("e0-0") is None for _ in range(2)] == [False, True]
    for task_id in ("a", "b"):
        admission.add(task_id, DispatchedTask("x", False, 0, 0.5))
    admission.remove("a")
    assert admission.busy.tolist() == [False, True]
    admission.remove("b")
    assert admission.busy.tolist() == [False, False]


STEPS, BATCH = 4, 12


def deterministic(folder: Path, prompts: int = 30, **sections: Any) -> Config:
    run, sampler = {"steps": STEPS, "deterministic": True}, {"batch_size": BATCH, "max_staleness": 0}
    run |= sections.pop("run", {})
    sampler |= sections.pop("sampler", {})
    return make_config(folder, prompts=prompts, run=run, sampler=sampler, episode={"rollouts_every": 0}, **sections)


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


METHODS: dict[str, dict[str, Any]] = {
    "spo, many prompts": {"prompts": 400, "sampler": {"selection": {"criterion": "thompson"}}},
    "rloo": {"algorithm": {"method": "rloo", "group_size": 4, "refill_degenerate": True}},
}


@pytest.mark.parametrize("method", METHODS)
def test_neither_order_nor_restarts_change_a_run(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (selection, tracker):
        monkeypatch.setattr(module, "SMALL_POOL", 100)
    config = deterministic(tmp_path, **METHODS[method])
    undisturbed = decisions(config, seed=0, restarts=False)
    assert len(undisturbed[1]) == STEPS
    for seed in (1, 2):
        assert decisions(config, seed, restarts=True) == undisturbed


def test_each_task_of_each_run_has_a_seed_of_its_own(tmp_path: Path) -> None:
    sent, *_ = decisions(deterministic(tmp_path), seed=0, restarts=False)
    others, *_ = decisions(deterministic(tmp_path, run={"seed": 1}), seed=0, restarts=False)
    seeds = {task.seed for task in (*sent.values(), *others.values())}
    assert len(seeds) == len(sent) + len(others)
    assert None not in seeds


def test_an_evaluation_that_starts_again_has_the_same_seeds(broker: Broker, tmp_path: Path) -> None:
    sampler, generator = start(deterministic(tmp_path, heldout=5), broker), NoopGenerator(broker)
    NoopLearner(broker)
    sampler.round()
    assert [task.evaluation for task in sampler.state.admission.in_flight.values()] == [1] * 5, "training waits for it"
    assert generator.work(oldest_version=0, newest_version=1) == 5  # by two versions: so it starts again
    sampler.round()
    assert generator.work() == 5
    first, second = generator.tasks[:5], generator.tasks[5:]
    assert [task.seed for task in first] == [task.seed for task in second]
    assert len({task.seed for task in first} - {None}) == 5
    assert not {task.task_id for task in first} & {task.task_id for task in second}


def test_an_evaluation_does_not_depend_on_answers_order(broker: Broker, tmp_path: Path) -> None:
    config = deterministic(tmp_path, heldout=10, run={"steps": 1})
    sampler, generator, learner = start(config, broker), NoopGenerator(broker), NoopLearner(broker)

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
    first, second = broker.evaluations()
    assert [first["version"], second["version"]] == [0, 1]
    assert first["reward"] == second["reward"]
    assert first["accuracy"] == 0.1, "a part of the reward is no correct answer"


def test_a_version_announced_again_leaves_its_saved_state(broker: Broker, tmp_path: Path) -> None:
    config = deterministic(tmp_path)
    sampler, generator, learner = start(config, broker), NoopGenerator(broker), NoopLearner(broker)
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
