"""Several sources: how many tasks each gets, and which of its prompts."""

from __future__ import annotations

import numpy as np
import pytest

from common.config import TrackerConfig
from sampler.mixture import Mixture
from sampler.tracker import ValueTracker


def tracker(n: int) -> ValueTracker:
    return ValueTracker([f"p{i}" for i in range(n)], TrackerConfig())


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [5, 2, 2, 0.5, 0.01], [1e-6, 1, 1000]])
def test_shares_stay_within_a_few_tasks_of_the_weights(weights: list[float]) -> None:
    n = len(weights)
    mixture = Mixture(weights, range(n + 1))
    sources = mixture.sources(0, 100_000, np.zeros(n, bool))
    share = np.array(weights) / sum(weights)
    counts = np.cumsum(sources[:, None] == np.arange(n), axis=0)  # [tasks so far, sources]
    expected = np.arange(1, 100_001)[:, None] * share
    assert np.abs(counts - expected).max() < 6


def test_the_source_of_a_task_does_not_depend_on_how_many_are_dispatched_at_once() -> None:
    mixture, retired = Mixture([2, 1, 1], [0, 5, 9, 20]), np.zeros(20, bool)
    whole = mixture.sources(1000, 300, retired)
    parts = [mixture.sources(1000 + i, n, retired) for i, n in ((0, 1), (1, 99), (100, 200))]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert mixture.sources(10**9, 4, retired).max() < 3


def test_each_draw_is_a_prompt_of_its_source_by_the_trackers_weights() -> None:
    prompts, mixture = tracker(30), Mixture([1, 1, 2], [0, 10, 12, 30])
    for i in range(10):
        prompts.update(f"p{i}", 1.0 if i != 3 else 0.5, rho=0.001)
    drawn = mixture.draw(prompts, 400, rng(), None, first=0)
    sources = mixture.sources(0, 400, prompts.retired)
    bounds = np.array([0, 10, 12, 30])
    assert np.array_equal(np.searchsorted(bounds, drawn, side="right") - 1, sources)
    few = mixture.draw(prompts, 16, rng(), None, first=0)
    assert len(set(few[few >= 12])) == np.sum(few >= 12), "without replacement while a source is large enough"
    first = [mixture.draw(prompts, 4, np.random.default_rng(seed), None, first=0) for seed in range(200)]
    of_first = np.concatenate([draw[mixture.sources(0, 4, prompts.retired) == 0] for draw in first])
    assert np.bincount(of_first, minlength=10).argmax() == 3, "the uncertain prompt is met most"


def test_prompts_in_flight_come_last_within_their_source() -> None:
    prompts, mixture = tracker(8), Mixture([1, 1], [0, 4, 8])
    blocked = np.isin(np.arange(len(prompts.prompt_ids)), [0, 1, 2, 7])
    drawn = mixture.draw(prompts, 6, rng(), blocked, first=0)
    of_first, of_second = drawn[drawn < 4].tolist(), drawn[drawn >= 4].tolist()
    assert of_first[0] == 3
    assert 7 not in of_second[:3]


def test_a_source_without_prompts_gives_its_share_to_the_others() -> None:
    prompts, mixture = tracker(6), Mixture([1, 2, 1], [0, 2, 4, 6])
    for prompt_id in ("p4", "p5"):
        prompts.retire(prompt_id)
    drawn = mixture.draw(prompts, 90, rng(), None, first=0)
    assert drawn.max() < 4
    assert np.sum(drawn < 2) == pytest.approx(30, abs=3)


def test_one_source_draws_as_the_tracker_does() -> None:
    prompts, blocked = tracker(100), np.isin(np.arange(100), [1, 2, 3])
    alone = Mixture([5.0], [0, 100]).draw(prompts, 40, rng(), blocked, first=17)
    assert alone.tolist() == prompts.draw(40, rng(), blocked).tolist()
