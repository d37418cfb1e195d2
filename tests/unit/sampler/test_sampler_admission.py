"""Admission and the open batch: staleness is bounded whatever order answers come back in."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import AdvantageConfig, SamplerConfig
from sampler.admission import Admission
from sampler.batches import OpenBatch
from sampler.records import DispatchedTask, OpenSample, TrackerRow, tracker_rows


def config(batch_size: int, max_staleness: int, **advantage: bool) -> SamplerConfig:
    return SamplerConfig(batch_size=batch_size, max_staleness=max_staleness, advantage=AdvantageConfig(**advantage))


def sample(name: str, arrival: int = 0, advantage: float = 0.5, oldest: int = 0, tokens: int = 8) -> OpenSample:
    return OpenSample(name, arrival, advantage, 1.0, tokens, tokens, oldest, oldest)


@given(
    batch_size=st.integers(1, 5),
    max_staleness=st.integers(0, 3),
    steps=st.integers(1, 12),
    seed=st.integers(0, 10_000),
    slow=st.floats(0.0, 0.9),
)
@settings(max_examples=200, deadline=None)
def test_nothing_is_late_and_outstanding_is_bounded_whatever_overtakes_what(
    batch_size: int, max_staleness: int, steps: int, seed: int, slow: float
) -> None:
    """Random order of arrival, random learner; some tasks are passed over again and again."""
    rng = np.random.default_rng(seed)
    admission = Admission(config(batch_size, max_staleness), steps)
    waiting = OpenBatch(config(batch_size, max_staleness))
    version, dispatched, arrivals, trained = 0, 0, 0, []
    closed: list[int] = []
    stragglers: set[str] = set()
    for _ in range(100 * steps * batch_size):
        if version == steps:
            break
        for _ in range(admission.room(version, waiting.next_id, len(waiting))):
            position = admission.total(waiting.next_id, len(waiting))
            assert admission.min_version(position) <= version
            task_id = f"t{dispatched}"
            admission.add(task_id, DispatchedTask(f"p{dispatched}", False, version, 0.5))
            dispatched += 1
            if rng.random() < slow:
                stragglers.add(task_id)
        outstanding = admission.total(waiting.next_id - version, len(waiting))
        assert outstanding <= (max_staleness + 1) * batch_size
        quick = [task_id for task_id in admission.in_flight if task_id not in stragglers]
        pool = quick or list(admission.in_flight)
        if pool and (rng.random() < 0.7 or not closed):
            task_id = pool[rng.integers(len(pool))]
            task = admission.remove(task_id)
            assert task is not None
            waiting.add(sample(task_id, arrivals, oldest=task.version))
            arrivals += 1
        elif closed:
            assert closed.pop(0) == version
            version += 1
        while waiting.full() and not admission.must_wait(waiting.next_id, waiting.versions):
            assert waiting.drop_late() == []
            closed_batch = waiting.close()
            batch = closed_batch.manifest
            assert len(batch.sample_ids) == batch_size
            assert max(batch.batch_id - s.oldest_version for s in closed_batch.samples) <= max_staleness
            closed.append(batch.batch_id)
            trained += batch.sample_ids
    assert version == steps, "the run ended"
    assert sorted(trained) == sorted(f"t{i}" for i in range(steps * batch_size))
    assert dispatched == steps * batch_size, "no task too many"


def test_evaluation_takes_no_room_and_holds_no_batch_back() -> None:
    admission = Admission(config(4, 0), 2, index={"h": 0})
    admission.add("e0-0", DispatchedTask("h", True, 0, 0.0))
    assert admission.room(0, 0, 0) == 4
    assert not admission.must_wait(5, Counter())
    assert admission.busy.tolist() == [False]
    assert admission.remove("e0-0") is not None
    assert admission.remove("e0-0") is None


def test_two_responses_of_one_prompt_keep_it_busy_until_both_are_in() -> None:
    admission = Admission(config(4, 0), 2, index={"w": 0, "x": 1})
    for task_id in ("a", "b"):
        admission.add(task_id, DispatchedTask("x", False, 0, 0.5))
    admission.remove("a")
    assert admission.busy.tolist() == [False, True]
    admission.remove("b")
    assert admission.busy.tolist() == [False, False]


def test_a_late_sample_leaves_and_makes_room_for_another() -> None:
    admission, waiting = Admission(config(2, 1), 10), OpenBatch(config(2, 1), next_id=3)
    waiting.add(sample("old", 0, oldest=1))
    waiting.add(sample("just", 1, oldest=2))
    assert admission.room(3, 3, len(waiting)) == 2
    assert [late.sample_id for late in waiting.drop_late()] == ["old"]
    assert not waiting.full()
    assert admission.room(3, 3, len(waiting)) == 3


def test_a_batch_takes_the_oldest_weights_and_lists_them_as_they_came() -> None:
    waiting = OpenBatch(config(2, 4), next_id=4)
    for arrival, oldest in enumerate([4, 3, 2]):
        waiting.add(sample(f"s{arrival}", arrival, advantage=float(arrival), oldest=oldest))
    closed = waiting.close()
    assert closed.manifest.sample_ids == ["s1", "s2"]
    assert [s.oldest_version for s in closed.samples] == [3, 2]
    assert closed.manifest.advantages == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert [s.sample_id for s in waiting.samples()] == ["s0"]
    assert waiting.next_id == 5


def test_a_batch_of_equal_advantages_trains_on_nothing() -> None:
    waiting = OpenBatch(config(3, 4))
    for arrival in range(3):
        waiting.add(sample(f"s{arrival}", arrival, advantage=0.3))
    assert waiting.close().manifest.advantages == [0.0, 0.0, 0.0]


def test_advantages_may_be_weighted_by_model_tokens() -> None:
    waiting = OpenBatch(config(3, 4, token_weighted=True))
    for arrival, (advantage, tokens) in enumerate([(0.5, 1), (-0.5, 10), (0.1, 5)]):
        waiting.add(sample(f"s{arrival}", arrival, advantage, tokens=tokens))
    batch = waiting.close().manifest
    assert np.average(batch.advantages, weights=batch.tokens) == pytest.approx(0)
    assert np.mean(batch.advantages) != pytest.approx(0)


@given(st.floats(0, 30), st.floats(0, 30), st.integers(-1, 2**40), st.booleans(), st.text(max_size=20))
def test_packed_state_comes_back_whole(alpha: float, beta: float, version: int, flag: bool, name: str) -> None:
    row = TrackerRow(alpha, beta, alpha / 2, 3, version, flag)
    assert TrackerRow.unpack(row.pack()) == row
    (fields,) = tracker_rows([row.pack()])
    assert tuple(fields) == (alpha, beta, alpha / 2, 3, version, flag)
    task = DispatchedTask(name, flag, version, alpha)
    assert DispatchedTask.unpack(task.pack()) == task
    waiting = OpenSample(name, 1, alpha, beta, 2, 3, version, 4)
    assert OpenSample.unpack(waiting.pack()) == waiting
