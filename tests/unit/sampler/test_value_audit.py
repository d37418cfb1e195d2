"""The audit of values: variance saved, calibration, and how many prompts are always or never solved."""

from __future__ import annotations

import numpy as np
import pytest

from common.config import RunTrackerConfig, TrackerConfig
from sampler.tracker import ValueTracker
from sampler.value_audit import ValueAudit


def audit_of(values: np.ndarray, rewards: np.ndarray, batches: int = 8) -> dict[str, float]:
    audit, figures = ValueAudit(ValueTracker(["a"], TrackerConfig())), {}
    for part in np.array_split(np.stack([values, rewards], 1), batches):
        for value, reward in part.tolist():
            audit.add(value, reward)
        figures = audit.of_batch()
    return figures


def test_the_ratio_is_that_of_the_variances_within_batches() -> None:
    rng = np.random.default_rng(0)
    rates = rng.choice([0.1, 0.9], 4096)
    rewards = (rng.random(4096) < rates).astype(float)
    figures = audit_of(rates, rewards)
    # Var(r) = 0.25, and 0.09 of it is left within prompts.
    assert figures["tracker/variance_ratio"] == pytest.approx(0.36, abs=0.02)
    low, high = figures["tracker/variance_ratio_low"], figures["tracker/variance_ratio_high"]
    assert low < 0.36 < high < low + 0.1
    assert figures["tracker/calibration_error"] < 0.02
    assert figures["tracker/reward_where_value_is_0.1"] == pytest.approx(0.1, abs=0.03)
    assert figures["tracker/reward_where_value_is_0.9"] == pytest.approx(0.9, abs=0.03)
    assert "tracker/reward_where_value_is_0.5" not in figures


def test_noise_in_the_values_costs_variance_and_a_constant_does_not() -> None:
    rng = np.random.default_rng(1)
    rewards = (rng.random(4096) < 0.5).astype(float)
    assert audit_of(np.full(4096, 0.9), rewards)["tracker/variance_ratio"] == pytest.approx(1.0)
    assert audit_of(rng.random(4096), rewards)["tracker/variance_ratio"] > 1.25
    assert audit_of(np.full(4096, 0.9), rewards)["tracker/calibration_error"] == pytest.approx(0.4, abs=0.03)


def test_a_band_needs_some_batches_and_a_ratio_needs_rewards_that_differ() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    assert "tracker/variance_ratio_low" not in audit_of(rewards / 2, rewards, batches=3)
    assert "tracker/variance_ratio" not in audit_of(rewards, np.ones(6), batches=3)


def test_prompts_that_are_always_and_never_solved_are_counted_among_those_that_were_visited() -> None:
    tracker = ValueTracker(list("abcde"), RunTrackerConfig())
    for prompt_id, rewards in {"a": (1, 1), "b": (0, 0, 0), "c": (1, 0), "d": (1,)}.items():
        for reward in rewards:
            tracker.update(prompt_id, reward, kl=0.03)
    audit = ValueAudit(tracker)
    histograms, figures = audit.of_pool(), audit.of_batch()
    assert figures["tracker/visited"] == 0.8
    assert figures["tracker/always_solved"] == 0.5
    assert figures["tracker/never_solved"] == 0.25
    assert figures["tracker/k"] in (np.inf, 64, 32, 16, 8, 4, 2, 1, 0.5)
    assert histograms["tracker/visits"].counts == [1, 1, 2, 1]
    assert sum(histograms["tracker/value_percent"].counts) == 5


def test_figures_of_all_prompts_are_made_anew_when_one_in_sixteen_was_answered() -> None:
    tracker = ValueTracker([f"p{i}" for i in range(320)], RunTrackerConfig())
    audit = ValueAudit(tracker)
    made = []
    for number in range(60):
        tracker.update(f"p{number}", 1.0)
        audit.add(0.5, 1.0)
        made.append(bool(audit.of_pool()))
        assert (audit.of_batch()["tracker/visited"] * 320) >= number - 20
    assert [number for number, new in enumerate(made) if new] == [0, 20, 40]
