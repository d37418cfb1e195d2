"""Drawing prompts: weights (golden cases C), draws without duplicates by the right probabilities, and sources."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import SelectionConfig, TrackerConfig
from sampler.values import selection
from sampler.values.mixture import Mixture
from sampler.values.selection import draw, probabilities, selection_weights
from sampler.values.tracker import ValueTracker
from tests.support.golden import golden


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-6, abs=1e-10)


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


def tracker(n: int) -> ValueTracker:
    return ValueTracker([f"p{i}" for i in range(n)], TrackerConfig())


@pytest.mark.parametrize("case", ["C01", "C03"])
def test_weights_are_widest_where_success_is_a_coin_toss(case: str) -> None:
    inputs, expected = golden(case)
    values, sizes = np.array(inputs["v"]), np.array(inputs.get("N_eff", np.ones(len(inputs["v"]))), float)
    config = SelectionConfig(gamma=inputs.get("gamma", 0.0), epsilon=inputs["epsilon"])
    weights = selection_weights(values, sizes, config)
    assert weights.tolist() == close(expected["weights"])
    assert probabilities(weights).tolist() == close(expected["probs"])
    made = ValueTracker([str(i) for i in range(len(values))], TrackerConfig(), config)
    made.alpha[:], made.beta[:] = values * sizes, (1 - values) * sizes
    assert made.sampling_weights().tolist() == close(expected["weights"])


def test_c02_unknown_prompts_weigh_nothing_unless_all_are() -> None:
    inputs, expected = golden("C02")
    values = np.array([inputs["v"].get(prompt, np.nan) for prompt in inputs["prompts"]])
    weights = selection_weights(values, np.ones(3), SelectionConfig())
    assert weights.tolist() == close(expected["weights"])
    assert probabilities(weights).tolist() == close(expected["probs"])
    unknown = selection_weights(np.full(3, np.nan), np.ones(3), SelectionConfig())
    assert probabilities(unknown).tolist() == close(expected["all_unknown_probs"])
    assert {int(draw(unknown, 1, rng(seed))[0]) for seed in range(100)} == {0, 1, 2}


@given(
    size=st.integers(1, 60),
    n=st.integers(0, 60),
    blocked=st.sets(st.integers(0, 59)),
    seed=st.integers(0, 1000),
    small=st.sampled_from([0, 4096]),
)
def test_a_draw_repeats_nothing_and_takes_blocked_ones_last(
    size: int, n: int, blocked: set[int], seed: int, small: int
) -> None:
    blocked = {i for i in blocked if i < size}
    weights = rng(seed).uniform(0.05, 0.55, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "SMALL_POOL", small)  # 0: even small pools are drawn from by proposals
        drawn = draw(weights, n, rng(seed), np.isin(np.arange(size), list(blocked))).tolist()
    assert len(drawn) == n
    assert set(drawn) <= set(range(size))
    if n <= size:
        assert len(set(drawn)) == n
        assert not blocked.intersection(drawn[: size - len(blocked)])


@pytest.mark.integration  # computes for seconds
@pytest.mark.parametrize("small", [0, 4096], ids=["by proposals", "by keys"])
def test_both_ways_to_draw_have_the_probabilities_of_one_by_one(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "SMALL_POOL", small)
    weights = np.array([0.55, 0.05, 0.3, 0.2] + [0.1] * 14)
    blocked = np.arange(len(weights)) == 3
    generator = rng(1)
    pairs = np.array([draw(weights, 2, generator, blocked) for _ in range(10_000)])
    left = np.where(blocked, 0, weights)
    first, second = left / left.sum(), np.zeros(len(left))
    for i in np.flatnonzero(left):
        after = np.where(np.arange(len(left)) == i, 0, left)
        second += first[i] * after / after.sum()
    for column, expected in zip(pairs.T, (first, second), strict=True):
        np.testing.assert_allclose(np.bincount(column, minlength=18) / len(pairs), expected, atol=0.02)


def test_replacement_only_when_more_are_wanted_than_exist() -> None:
    weights = np.array([0.5, 0.0, 0.1])
    assert sorted(draw(weights, 2, rng()).tolist()) == [0, 2]
    many = draw(weights, 1000, rng())
    assert np.mean(many == 0) == pytest.approx(5 / 6, abs=0.05)
    assert set(many.tolist()) == {0, 2}


def test_very_uneven_weights_still_fill_the_draw() -> None:
    weights = np.full(100_000, 1e-9)
    weights[:3] = 1.0
    drawn = set(draw(weights, 200, rng()).tolist())
    assert len(drawn) == 200
    assert {0, 1, 2} <= drawn


def test_retired_prompts_are_never_drawn() -> None:
    made = ValueTracker(["a", "b", "c"], TrackerConfig(), SelectionConfig(gamma=0.5))
    made.update("a", 1.0, kl=0.02)
    made.update("b", 0.0)
    made.retire("c")
    counts = np.array([made.counts(prompt_id) for prompt_id in "abc"])
    size = counts.sum(axis=1)
    expected = selection_weights(counts[:, 0] / size, size, SelectionConfig(gamma=0.5)) * [1, 1, 0]
    np.testing.assert_allclose(made.sampling_weights(), expected, rtol=1e-12)
    made.update("c", 1.0)
    assert made.sampling_weights()[2] == 0
    assert set(made.select(50, rng())) == {"a", "b"}


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [5, 2, 2, 0.5, 0.01], [1e-6, 1, 1000]])
def test_shares_stay_within_a_few_tasks_of_the_weights(weights: list[float]) -> None:
    n = len(weights)
    sources = Mixture(weights, range(n + 1)).sources(0, 100_000, np.zeros(n, bool))
    counts = np.cumsum(sources[:, None] == np.arange(n), axis=0)  # [tasks so far, sources]
    expected = np.arange(1, 100_001)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts - expected).max() < 6


def test_a_tasks_source_does_not_depend_on_how_many_are_sent() -> None:
    mixture, retired = Mixture([2, 1, 1], [0, 5, 9, 20]), np.zeros(20, bool)
    whole = mixture.sources(1000, 300, retired)
    parts = [mixture.sources(1000 + i, n, retired) for i, n in ((0, 1), (1, 99), (100, 200))]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert mixture.sources(10**9, 4, retired).max() < 3


def test_each_draw_follows_source_and_weights() -> None:
    prompts, mixture, bounds = tracker(30), Mixture([1, 1, 2], [0, 10, 12, 30]), np.array([0, 10, 12, 30])
    for i in range(10):
        prompts.update(f"p{i}", 1.0 if i != 3 else 0.5, rho=0.001)
    drawn = mixture.draw(prompts, 400, rng(), None, first=0)
    sources = mixture.sources(0, 400, prompts.retired)
    assert np.array_equal(np.searchsorted(bounds, drawn, side="right") - 1, sources)
    few = mixture.draw(prompts, 16, rng(), None, first=0)
    assert len(set(few[few >= 12])) == np.sum(few >= 12), "without replacement while a source is large enough"
    first = np.concatenate([mixture.draw(prompts, 4, rng(seed), None, first=0) for seed in range(200)])
    assert np.bincount(first[first < 10], minlength=10).argmax() == 3, "the uncertain prompt is met most"


def test_prompts_in_flight_come_last_within_their_source() -> None:
    blocked = np.isin(np.arange(8), [0, 1, 2, 7])
    drawn = Mixture([1, 1], [0, 4, 8]).draw(tracker(8), 6, rng(), blocked, first=0)
    assert drawn[drawn < 4][0] == 3
    assert 7 not in drawn[drawn >= 4][:3]


def test_a_source_without_prompts_gives_its_share_to_the_others() -> None:
    prompts = tracker(6)
    for prompt_id in ("p4", "p5"):
        prompts.retire(prompt_id)
    drawn = Mixture([1, 2, 1], [0, 2, 4, 6]).draw(prompts, 90, rng(), None, first=0)
    assert drawn.max() < 4
    assert np.sum(drawn < 2) == pytest.approx(30, abs=3)
