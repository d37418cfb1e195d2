"""The value tracker (golden cases A), the drift of prompts, and drawing by weights (golden cases C) and sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import DriftConfig, SelectionConfig, TrackerConfig
from common.errors import UserError
from common.files import tracker_path
from sampler.files.snapshots import read_snapshot, write_snapshot
from sampler.mixture import Mixture
from sampler.state import SamplerState
from sampler.tracker import ValueTracker
from sampler.values import selection
from sampler.values.drift import PromptDrift
from sampler.values.selection import CRITERIA, draw, probabilities, selection_weights
from tests.support.golden import close, golden
from tests.support.sampler import flip_in_directory, make_config


def tracker(alpha: float = 0.5, beta: float = 0.5, **config: Any) -> ValueTracker:
    made = ValueTracker(["x"], TrackerConfig(**config))
    made.alpha[0], made.beta[0] = alpha, beta
    return made


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
    # A damaged directory of the archive may call the arrays encrypted (flag 1), or packed by an unknown method.
    for field, bits in ((8, 1), (10, 99)):
        damaged = tmp_path / f"{field}.npz"
        damaged.write_bytes(newest.read_bytes())
        flip_in_directory(damaged, field, bits)
        with pytest.raises(UserError, match=f"{field}.npz cannot be read"):
            read_snapshot(damaged, fresh)
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


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


def scores(values: np.ndarray) -> np.ndarray:
    return CRITERIA["std"](values, values, values, rng())


def trackers(n: int) -> ValueTracker:
    return ValueTracker([f"p{i}" for i in range(n)], TrackerConfig())


@pytest.mark.parametrize("case", ["C01", "C03"])
def test_weights_are_widest_where_success_is_a_coin_toss(case: str) -> None:
    inputs, expected = golden(case)
    values, sizes = np.array(inputs["v"]), np.array(inputs.get("N_eff", np.ones(len(inputs["v"]))), float)
    config = SelectionConfig(gamma=inputs.get("gamma", 0.0), epsilon=inputs["epsilon"])
    weights = selection_weights(scores(values), sizes, config)
    assert weights.tolist() == close(expected["weights"])
    assert probabilities(weights).tolist() == close(expected["probs"])
    made = ValueTracker([str(i) for i in range(len(values))], TrackerConfig(), config)
    made.alpha[:], made.beta[:] = values * sizes, (1 - values) * sizes
    assert made.sampling_weights().tolist() == close(expected["weights"])


def test_c02_unknown_prompts_weigh_nothing_unless_all_are() -> None:
    inputs, expected = golden("C02")
    values = np.array([inputs["v"].get(prompt, np.nan) for prompt in inputs["prompts"]])
    weights = selection_weights(scores(values), np.ones(3), SelectionConfig())
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
def test_a_draw_repeats_nothing_and_takes_blocked_last(size: int, n: int, blocked: set, seed: int, small: int) -> None:
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
    expected = selection_weights(scores(counts[:, 0] / size), size, SelectionConfig(gamma=0.5)) * [1, 1, 0]
    np.testing.assert_allclose(made.sampling_weights(), expected, rtol=1e-12)
    made.update("c", 1.0)
    assert made.sampling_weights()[2] == 0
    assert set(made.draw(50, rng()).tolist()) == {0, 1}


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
    prompts, mixture, bounds = trackers(30), Mixture([1, 1, 2], [0, 10, 12, 30]), np.array([0, 10, 12, 30])
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
    drawn = Mixture([1, 1], [0, 4, 8]).draw(trackers(8), 6, rng(), blocked, first=0)
    assert drawn[drawn < 4][0] == 3
    assert 7 not in drawn[drawn >= 4][:3]


def test_a_source_without_prompts_gives_its_share_to_the_others() -> None:
    prompts = trackers(6)
    for prompt_id in ("p4", "p5"):
        prompts.retire(prompt_id)
    drawn = Mixture([1, 2, 1], [0, 2, 4, 6]).draw(prompts, 90, rng(), None, first=0)
    assert drawn.max() < 4
    assert np.sum(drawn < 2) == pytest.approx(30, abs=3)
