"""Drawing prompts: no duplicates, exclusions respected, and the right probabilities on every path."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import SelectionConfig, TrackerConfig
from sampler import selection
from sampler.selection import draw
from sampler.tracker import ValueTracker


@given(
    size=st.integers(1, 60),
    n=st.integers(0, 60),
    blocked=st.sets(st.integers(0, 59)),
    seed=st.integers(0, 1000),
    small=st.sampled_from([0, 4096]),
)
@settings(max_examples=300, deadline=None)
def test_a_draw_repeats_nothing_and_takes_blocked_ones_last(
    size: int, n: int, blocked: set[int], seed: int, small: int
) -> None:
    blocked = {i for i in blocked if i < size}
    weights = np.random.default_rng(seed).uniform(0.05, 0.55, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "SMALL_POOL", small)  # 0: even small pools are drawn from by proposals
        drawn = draw(weights, n, np.random.default_rng(seed), np.isin(np.arange(size), list(blocked))).tolist()
    assert len(drawn) == n
    assert all(0 <= i < size for i in drawn)
    if n <= size:
        assert len(set(drawn)) == n
    free = size - len(blocked)
    if n <= free:
        assert not blocked.intersection(drawn)
    elif n <= size:
        assert not blocked.intersection(drawn[:free])


@pytest.mark.parametrize("small", [0, 4096], ids=["by proposals", "by keys"])
def test_both_ways_to_draw_have_the_probabilities_of_drawing_one_by_one(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "SMALL_POOL", small)
    weights = np.array([0.55, 0.05, 0.3, 0.2] + [0.1] * 14)
    blocked = np.arange(len(weights)) == 3
    rng = np.random.default_rng(1)
    pairs = np.array([draw(weights, 2, rng, blocked) for _ in range(40_000)])
    left = weights.copy()
    left[3] = 0
    first = left / left.sum()
    second = np.zeros_like(first)
    for i in np.flatnonzero(left):
        after = left.copy()
        after[i] = 0
        second += first[i] * after / after.sum()
    np.testing.assert_allclose(np.bincount(pairs[:, 0], minlength=18) / len(pairs), first, atol=0.01)
    np.testing.assert_allclose(np.bincount(pairs[:, 1], minlength=18) / len(pairs), second, atol=0.01)


def test_replacement_only_when_more_are_wanted_than_exist() -> None:
    rng = np.random.default_rng(0)
    weights = np.array([0.5, 0.0, 0.1])
    assert sorted(draw(weights, 2, rng).tolist()) == [0, 2]
    many = draw(weights, 1000, rng)
    assert len(many) == 1000
    assert 1 not in many
    assert np.mean(many == 0) == pytest.approx(5 / 6, abs=0.05)


def test_very_uneven_weights_still_fill_the_draw() -> None:
    weights = np.full(100_000, 1e-9)
    weights[:3] = 1.0
    drawn = draw(weights, 200, np.random.default_rng(0))
    assert len(set(drawn.tolist())) == 200
    assert {0, 1, 2} <= set(drawn.tolist())


def test_a_million_prompts_with_thousands_in_flight() -> None:
    tracker = ValueTracker([f"p{i}" for i in range(1_000_000)], TrackerConfig(), SelectionConfig())
    exclude = [f"p{i}" for i in range(5120)]
    rng = np.random.default_rng(0)
    chosen = tracker.select(1024, rng, exclude)
    assert len(set(chosen)) == 1024
    assert not set(chosen).intersection(exclude)


def test_weights_follow_updates_and_retired_prompts_are_never_drawn() -> None:
    tracker = ValueTracker(["a", "b", "c"], TrackerConfig(), SelectionConfig(gamma=0.5))
    tracker.update("a", 1.0, kl=0.02)
    tracker.update("b", 0.0)
    tracker.retire("c")
    counts = np.array([tracker.counts(prompt_id) for prompt_id in "abc"])
    size = counts.sum(axis=1)
    values = counts[:, 0] / size
    expected = selection.selection_weights(values, size, SelectionConfig(gamma=0.5)) * [1, 1, 0]
    np.testing.assert_allclose(tracker.sampling_weights(), expected, rtol=1e-12)
    tracker.update("c", 1.0)
    assert tracker.sampling_weights()[2] == 0
    assert set(tracker.select(50, np.random.default_rng(0))) == {"a", "b"}
