"""The value tracker, its checkpoints, and the drift of prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import DriftConfig, TrackerConfig
from common.errors import UserError
from common.files import tracker_path
from sampler.advantages import normalize
from sampler.prompt_drift import PromptDrift
from sampler.snapshots import read_snapshot, write_snapshot
from sampler.state import SamplerState
from sampler.tracker import ValueTracker
from tests.support.sampler import make_config


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.1)), min_size=1, max_size=40))
def test_counts_are_a_moving_average(visits: list[tuple[float, float]]) -> None:
    tracker = ValueTracker(["x"], TrackerConfig())
    value, size = 0.5, 1.0
    for reward, drift in visits:
        rho = tracker.rho(drift)
        assert tracker.update("x", reward, drift) == pytest.approx(value, abs=1e-9)
        rate = 1 / (rho * size + 1)
        value, size = value + rate * (reward - value), rho * size + 1
    assert tracker.value("x") == pytest.approx(value, abs=1e-9)
    assert sum(tracker.counts("x")) == pytest.approx(size)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=50))
def test_normalized_advantages_are_finite_and_centred(raw: list[float]) -> None:
    normal = normalize(np.array(raw))
    assert np.isfinite(normal).all()
    assert normal.mean() == pytest.approx(0, abs=1e-6)


def test_rewards_outside_the_declared_range_are_an_error_and_inside_rescaled() -> None:
    with pytest.raises(ValueError, match=r"reward 3.0 is outside .*reward_range \[0.0, 1.0\]"):
        ValueTracker(["x"], TrackerConfig()).update("x", 3.0)
    tracker = ValueTracker(["x"], TrackerConfig(reward_range=(-1.0, 3.0)))
    tracker.update("x", 2.0, rho=0.9)
    assert tracker.counts("x") == pytest.approx((0.45 + 0.75, 0.45 + 0.25))
    with pytest.raises(ValueError, match="outside"):
        tracker.initialize({"x": [4.0]})


@pytest.mark.parametrize("ids", [[], ["a", "b", "a"]])
def test_prompt_ids_are_unique_and_some(ids: list[str]) -> None:
    with pytest.raises(ValueError, match="only once"):
        ValueTracker(ids, TrackerConfig())


def test_wrong_weights_of_advantages_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        normalize(np.array([1.0, 0.0]), np.array([1.0]))
    with pytest.raises(ValueError, match="finite"):
        normalize(np.array([1.0, np.nan]))
    assert normalize(np.array([1.0, 0.0]), np.array([0.0, 0.0])).tolist() == [0.0, 0.0]


def test_state_carries_over_to_the_prompts_that_are_still_there() -> None:
    old = ValueTracker(["a", "b", "ü"], TrackerConfig())
    old.update("a", 1.0)
    old.update("ü", 0.0)
    old.retire("b")
    new = ValueTracker(["ü", "new", "b"], TrackerConfig())
    new.load_state_dict(old.state_dict())
    assert new.counts("ü") == old.counts("ü")
    assert new.counts("new") == (0.5, 0.5)
    assert new.sampling_weights()[2] == 0
    assert new.sampling_weights()[0] == old.sampling_weights()[2]


def test_a_checkpoint_restores_tracker_and_drift_and_older_ones_go(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    state = SamplerState(config, ["a", "b"])
    state.tracker.update("b", 1.0)
    state.drift.record(1, 0.25)
    state.drift.measure(1, None, 1)
    for version in (8, 9, 10, 11):
        write_snapshot(tracker_path(tmp_path, version), state, keep=2)
    folder = tmp_path / "checkpoints" / "tracker"
    assert sorted(path.name for path in folder.iterdir()) == ["step_10.npz", "step_11.npz"]
    fresh = SamplerState(config, ["b", "c"])
    assert read_snapshot(tracker_path(tmp_path, 11), fresh) == b""
    assert fresh.tracker.counts("b") == state.tracker.counts("b")
    assert fresh.drift.cumulative(1) == 0.25
    assert fresh.drift.answered.tolist() == [1, -1]
    assert read_snapshot(tracker_path(tmp_path, 7), fresh) is None
    tracker_path(tmp_path, 11).write_bytes(b"not an archive")
    with pytest.raises(UserError, match="step_11.npz cannot be read"):
        read_snapshot(tracker_path(tmp_path, 11), fresh)


def test_rescore_takes_what_the_generator_measured_except_at_the_first_visit() -> None:
    prompt_drift = PromptDrift(DriftConfig(mode="rescore"), 2)
    assert prompt_drift.measure(0, 0.5, 3) == 0.0
    assert prompt_drift.measure(0, 0.02, 4) == 0.02
    assert prompt_drift.measure(0, None, 4) == 0.0


def test_ledger_sums_the_steps_between_two_responses() -> None:
    prompt_drift = PromptDrift(DriftConfig(mode="ledger"), 2)
    for version, drift in enumerate([0.0, 0.01, 0.02, 0.04]):
        prompt_drift.record(version, drift)
    assert prompt_drift.measure(0, None, 1) == 0.0
    assert prompt_drift.measure(0, None, 3) == pytest.approx(0.06)
    assert prompt_drift.measure(0, None, 2) == 0.0, "an older answer that came later has not moved"
    assert prompt_drift.measure(0, None, 9) == 0.0, "steps not announced yet add nothing"
    assert prompt_drift.answered[0] == 9


def test_a_repeated_step_counts_once_and_a_resumed_learner_starts_late() -> None:
    prompt_drift = PromptDrift(DriftConfig(mode="ledger"), 1)
    assert prompt_drift.record(5, 0.0)
    assert prompt_drift.record(6, 0.5)
    assert not prompt_drift.record(6, 0.25)
    assert prompt_drift.cumulative(6) - prompt_drift.cumulative(2) == 0.5
