"""Bands over prompts and over seeds, and where curves cross a threshold, against the same by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.folder.statistics import (
    Curve,
    bootstrap,
    first_reaching,
    over_runs,
    smoothed,
    spread,
)


def curve(points: dict[float, float]) -> Curve:
    return Curve(np.array(list(points), float), np.array(list(points.values()), float))


def test_the_band_over_prompts_is_that_of_all_resamples() -> None:
    values = np.array([0.0, 0.25, 0.5, 1.0, 1.0])
    means = np.sort([np.mean(draw) for draw in itertools.product(values, repeat=5)])
    low, high = np.quantile(means, (0.025, 0.975))
    band = bootstrap(values)
    assert band.mean == values.mean()
    # 10,000 draws of means that lie on a grid of 0.05.
    assert (band.low, band.high) == (pytest.approx(low, abs=0.05), pytest.approx(high, abs=0.05))


def test_the_band_of_many_prompts_is_that_of_their_mean() -> None:
    values = np.random.default_rng(1).normal(0.5, 0.3, 5000)
    error = values.std() / np.sqrt(5000)
    mean, low, high = bootstrap(values)
    assert (low, high) == (
        pytest.approx(mean - 1.96 * error, abs=0.1 * error),
        pytest.approx(mean + 1.96 * error, abs=0.1 * error),
    )
    assert bootstrap(np.ones(5)) == (1.0, 1.0, 1.0)


def test_the_band_over_seeds_goes_from_the_lowest_to_the_highest() -> None:
    assert spread([0.5, 0.2, 0.8]) == (0.5, 0.2, 0.8)


def test_runs_are_compared_as_far_as_all_of_them_went_and_between_their_own_versions() -> None:
    band = over_runs([curve({0: 0.0, 10: 1.0, 20: 1.0}), curve({0: 0.0, 5: 0.2, 12: 0.9}), curve({})])
    assert band.versions.tolist() == [0, 5, 10, 12]
    other = 0.2 + (0.9 - 0.2) * 5 / 7
    assert band.lows == pytest.approx([0, 0.2, other, 0.9])
    assert band.highs == pytest.approx([0, 0.5, 1.0, 1.0])
    assert band.means == pytest.approx([0, 0.35, (1 + other) / 2, 0.95])
    assert len(over_runs([]).versions) == 0


@settings(max_examples=50)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.integers(1, 12))
def test_smoothing_is_the_mean_of_the_last_values(values: list[float], window: int) -> None:
    by_hand = [np.mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
    assert smoothed(Curve(np.arange(len(values)), np.array(values)), window).values == pytest.approx(by_hand, abs=1e-9)


def test_a_threshold_is_reached_at_the_first_version_that_has_it() -> None:
    rising = curve({0: 0.1, 5: 0.6, 10: 0.5, 15: 0.9})
    assert first_reaching(rising, 0.5) == 5
    assert first_reaching(rising, 0.9) == 15
    assert first_reaching(rising, 0.95) is None
    assert first_reaching(curve({}), 0.5) is None
