"""The value tracker by the golden cases A, its checkpoints, and the drift of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config import DriftConfig, TrackerConfig
from common.errors import UserError
from common.files import tracker_path
from sampler.files.snapshots import read_snapshot, write_snapshot
from sampler.state import SamplerState
from sampler.values.drift import PromptDrift
from sampler.values.tracker import ValueTracker
from tests.support.golden import golden
from tests.support.sampler import make_config


def tracker(alpha: float = 0.5, beta: float = 0.5, **config: Any) -> ValueTracker:
    made = ValueTracker(["x"], TrackerConfig(**config))
    made.alpha[0], made.beta[0] = alpha, beta
    return made


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-6, abs=1e-10)


@pytest.mark.parametrize("case", ["A01", "A02", "A03", "A04"])
def test_initial_counts_come_from_the_scores_that_are_present(case: str) -> None:
    inputs, expected = golden(case)
    made = tracker(rho_min=inputs["rho_min"])
    made.initialize({"x": inputs["scores"]})
    kind = "corrected" if case == "A04" else "recipe"
    assert made.counts("x") == close((expected[f"{kind}_alpha"], expected[f"{kind}_beta"]))
    assert made.value("x") == close(expected[f"{kind}_v"])


def test_a05_without_scores_half_a_success_is_assumed() -> None:
    inputs, expected = golden("A05")
    made = ValueTracker(["x"], TrackerConfig())
    made.initialize({"x": []})
    assert made.counts("x") == close((expected["alpha0"], expected["beta0"]))
    assert made.update("x", inputs["reward"], kl=0.0) == 0.5
    assert made.counts("x") == close((expected["alpha1"], expected["beta1"]))


def test_a06_a07_rho_falls_with_drift_and_is_clipped() -> None:
    inputs, expected = golden("A06")
    wide = tracker(rho_min=1e-9, rho_max=1 - 1e-12)
    assert list(map(tracker().rho, inputs["D"])) == close(expected["rho"])
    assert list(map(wide.rho, inputs["D"])) == close(expected["rho_raw"])
    inputs, expected = golden("A07")
    measured = tracker(half_life=inputs["D_half"])
    assert list(map(measured.rho, expected["recipe_abs_attention_mask"])) == close(expected["rho_recipe"])


@pytest.mark.parametrize("case", ["A09", "A10", "A13"])
def test_an_update_decays_the_counts_and_adds_the_reward(case: str) -> None:
    inputs, expected = golden(case)
    made = tracker(inputs["alpha"], inputs["beta"])
    rewards = inputs["rewards"] if case == "A13" else [inputs["reward"]]
    for reward, rho in zip(rewards, inputs["rhos"] if case == "A13" else [inputs["rho"]], strict=True):
        assert made.value("x") == made.update("x", reward, rho=rho)
    counts = expected["sequential"] if case == "A13" else (expected["alpha"], expected["beta"])
    assert made.counts("x") == close(tuple(counts))


def test_a11_the_baseline_is_read_before_the_reward_is_counted() -> None:
    inputs, expected = golden("A11")
    made = tracker(inputs["alpha"], inputs["beta"])
    for visit, row in zip(inputs["visits"], expected["trace"], strict=True):
        assert made.rho(visit["D"]) == close(row["rho"])
        assert made.update("x", visit["r"], visit["D"]) == close(row["baseline"])
        assert made.counts("x") == close((row["alpha"], row["beta"]))
        assert made.value("x") == close(row["v"])


def test_a12_effective_counts_tend_to_one_over_one_minus_rho() -> None:
    inputs, expected = golden("A12")
    made = tracker(inputs["N0"] / 2, inputs["N0"] / 2)
    totals = {}
    for k in range(1, 201):
        made.update("x", k % 2, rho=inputs["rho"])
        totals[str(k)] = sum(made.counts("x"))
    assert {k: totals[k] for k in expected["N_after"]} == close(expected["N_after"])


def test_rewards_are_rescaled_and_refused_outside_their_range() -> None:
    made = tracker(reward_range=(-1.0, 3.0))
    made.update("x", 2.0, rho=0.9)
    assert made.counts("x") == pytest.approx((0.45 + 0.75, 0.45 + 0.25))
    with pytest.raises(ValueError, match="outside"):
        made.initialize({"x": [4.0]})
    with pytest.raises(ValueError, match=r"reward 3.0 is outside .*reward_range \[0.0, 1.0\]"):
        tracker().update("x", 3.0)


@pytest.mark.parametrize("ids", [[], ["a", "b", "a"]])
def test_prompt_ids_are_unique_and_some(ids: list[str]) -> None:
    with pytest.raises(ValueError, match="only once"):
        ValueTracker(ids, TrackerConfig())


def test_state_carries_over_to_the_prompts_that_are_still_there() -> None:
    old = ValueTracker(["a", "b", "ü"], TrackerConfig())
    old.update("a", 1.0)
    old.update("ü", 0.0)
    old.retire("b")
    new = ValueTracker(["ü", "new", "b"], TrackerConfig())
    new.load_state_dict(old.state_dict())
    assert (new.counts("ü"), new.counts("new")) == (old.counts("ü"), (0.5, 0.5))
    assert new.sampling_weights()[2] == 0
    assert new.sampling_weights()[0] == old.sampling_weights()[2]


def test_a_checkpoint_restores_tracker_and_drift(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    state = SamplerState(config, ["a", "b"])
    state.tracker.update("b", 1.0)
    state.drift.record(1, 0.25)
    state.drift.measure(1, None, 1)
    for version in (8, 9, 10, 11):
        write_snapshot(tracker_path(tmp_path, version), state, most=2)
    newest = tracker_path(tmp_path, 11)
    assert sorted(path.name for path in newest.parent.iterdir()) == ["step_10.npz", "step_11.npz"]
    fresh = SamplerState(config, ["b", "c"])
    assert read_snapshot(newest, fresh) == b""
    assert fresh.tracker.counts("b") == state.tracker.counts("b")
    assert fresh.drift.cumulative(1) == 0.25
    assert fresh.drift.answered.tolist() == [1, -1]
    assert read_snapshot(tracker_path(tmp_path, 7), fresh) is None
    newest.write_bytes(b"not an archive")
    with pytest.raises(UserError, match="step_11.npz cannot be read"):
        read_snapshot(newest, fresh)


def test_a08_rescore_takes_what_was_measured_after_one_visit() -> None:
    _, expected = golden("A08")
    rescore, constant = PromptDrift(DriftConfig(mode="rescore"), 2), PromptDrift(DriftConfig(mode="constant"), 1)
    assert [rescore.measure(0, *visit) for visit in ((0.5, 3), (0.02, 4), (None, 4))] == [expected["D"], 0.02, 0.0]
    assert tracker(1, 1).rho(expected["D"]) == close(expected["rho"])
    assert (rescore.rho, constant.rho) == (None, 0.9)
    assert constant.measure(0, 5.0, 1) == constant.measure(0, 5.0, 2) == 0.0


def test_ledger_sums_the_steps_between_two_responses() -> None:
    drift = PromptDrift(DriftConfig(mode="ledger"), 2)
    for version, moved in enumerate([0.0, 0.01, 0.02, 0.04]):
        drift.record(version, moved)
    # An older answer that came later has not moved, and steps not announced yet add nothing.
    measured = [drift.measure(0, None, version) for version in (1, 3, 2, 9)]
    assert measured == pytest.approx([0.0, 0.06, 0.0, 0.0])
    assert drift.answered[0] == 9


def test_a_repeated_step_counts_once() -> None:
    drift = PromptDrift(DriftConfig(mode="ledger"), 1)
    assert [drift.record(*step) for step in ((5, 0.0), (6, 0.5), (6, 0.25))] == [True, True, False]
    assert drift.cumulative(6) - drift.cumulative(2) == 0.5
