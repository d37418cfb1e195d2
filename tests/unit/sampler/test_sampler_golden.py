"""Golden cases A (tracker), B (advantages) and C (selection) of `spo_golden.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import DriftConfig, SelectionConfig, TrackerConfig
from sampler.advantages import normalize
from sampler.prompt_drift import PromptDrift
from sampler.selection import draw, probabilities, selection_weights
from sampler.tracker import ValueTracker

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[2] / "golden" / "spo_golden.json").read_text())["cases"]
}


def load(case_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return CASES[case_id]["inputs"], CASES[case_id]["expected"]


def tracker(alpha: float, beta: float) -> ValueTracker:
    made = ValueTracker(["x"], TrackerConfig())
    made.alpha[0], made.beta[0] = alpha, beta
    return made


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-6, abs=1e-10)


@pytest.mark.parametrize("case_id", ["A01", "A02", "A03", "A04"])
def test_initial_counts_come_from_the_scores_that_are_present(case_id: str) -> None:
    inputs, expected = load(case_id)
    made = ValueTracker(["x"], TrackerConfig(rho_min=inputs["rho_min"]))
    made.initialize({"x": inputs["scores"]})
    kind = "corrected" if case_id == "A04" else "recipe"
    assert made.counts("x") == close((expected[f"{kind}_alpha"], expected[f"{kind}_beta"]))
    assert made.value("x") == close(expected[f"{kind}_v"])
    assert sum(made.counts("x")) == close(8.0)


def test_a05_without_scores_half_a_success_and_half_a_failure_are_assumed() -> None:
    inputs, expected = load("A05")
    made = ValueTracker(["x"], TrackerConfig())
    made.initialize({"x": []})
    assert made.counts("x") == close((expected["alpha0"], expected["beta0"]))
    assert made.update("x", inputs["reward"], kl=0.0) == 0.5
    assert made.counts("x") == close((expected["alpha1"], expected["beta1"]))
    assert made.value("x") == close(expected["v1"])


def test_a06_rho_falls_with_drift_and_is_clipped() -> None:
    inputs, expected = load("A06")
    made = ValueTracker(["x"], TrackerConfig())
    assert [made.rho(drift) for drift in inputs["D"]] == close(expected["rho"])
    wide = ValueTracker(["x"], TrackerConfig(rho_min=1e-9, rho_max=1 - 1e-12))
    assert [wide.rho(drift) for drift in inputs["D"]] == close(expected["rho_raw"])
    assert wide.rho(expected["D_where_raw_is_0_96"]) == close(0.96)
    assert wide.rho(expected["D_where_raw_is_0_875"]) == close(0.875)


def test_a07_rho_of_measured_drift() -> None:
    inputs, expected = load("A07")
    made = ValueTracker(["x"], TrackerConfig(half_life=inputs["D_half"]))
    assert [made.rho(drift) for drift in expected["recipe_abs_attention_mask"]] == close(expected["rho_recipe"])


def test_a08_a_first_visit_has_no_drift_and_a_constant_rho_is_not_clipped() -> None:
    inputs, expected = load("A08")
    prompt_drift = PromptDrift(DriftConfig(mode="rescore"), 1)
    drift = prompt_drift.measure(0, None, newest_version=3)
    assert (drift, prompt_drift.rho) == (expected["D"], None)
    assert tracker(1, 1).rho(drift) == close(expected["rho"])
    constant = PromptDrift(DriftConfig(mode="constant", rho=0.99), 1)
    assert constant.rho == 0.99
    assert PromptDrift(DriftConfig(mode="constant", rho=inputs["rho_type_constant_value"]), 1).rho == 0.9
    assert constant.measure(0, 5.0, 1) == constant.measure(0, 5.0, 2) == 0.0


def test_a09_one_update_is_the_moving_average_of_rate_one_over_rho_n_plus_one() -> None:
    inputs, expected = load("A09")
    made = tracker(inputs["alpha"], inputs["beta"])
    assert made.update("x", inputs["reward"], rho=inputs["rho"]) == close(expected["v_before"])
    assert made.counts("x") == close((expected["alpha"], expected["beta"]))
    assert sum(made.counts("x")) == close(expected["N_eff"])
    assert made.value("x") == close(expected["v_after"])
    assert 1 / (inputs["rho"] * (inputs["alpha"] + inputs["beta"]) + 1) == close(expected["eta"])


def test_a10_rewards_need_not_be_binary() -> None:
    inputs, expected = load("A10")
    made = tracker(inputs["alpha"], inputs["beta"])
    made.update("x", inputs["reward"], rho=inputs["rho"])
    assert made.counts("x") == close((expected["alpha"], expected["beta"]))
    assert made.value("x") == close(expected["v_after"])


def test_a11_the_baseline_is_read_before_the_reward_is_counted() -> None:
    inputs, expected = load("A11")
    made = tracker(inputs["alpha"], inputs["beta"])
    for visit, row in zip(inputs["visits"], expected["trace"], strict=True):
        assert made.rho(visit["D"]) == close(row["rho"])
        baseline = made.update("x", visit["r"], visit["D"])
        assert baseline == close(row["baseline"])
        assert visit["r"] - baseline == close(row["raw_advantage"])
        assert made.counts("x") == close((row["alpha"], row["beta"]))
        assert made.value("x") == close(row["v"])


def test_a12_effective_counts_tend_to_one_over_one_minus_rho() -> None:
    inputs, expected = load("A12")
    made = tracker(inputs["N0"] / 2, inputs["N0"] / 2)
    totals = {}
    for k in range(1, 201):
        made.update("x", k % 2, rho=inputs["rho"])
        totals[str(k)] = sum(made.counts("x"))
    assert {k: totals[k] for k in expected["N_after"]} == close(expected["N_after"])
    for rho, limit in ((0.875, "limit_rho_0_875"), (0.96, "limit_rho_0_96")):
        for _ in range(2000):
            made.update("x", 1, rho=rho)
        assert sum(made.counts("x")) == close(expected[limit])


def test_a13_two_responses_of_one_prompt_are_counted_one_after_another() -> None:
    inputs, expected = load("A13")
    made = tracker(inputs["alpha"], inputs["beta"])
    for reward, rho in zip(inputs["rewards"], inputs["rhos"], strict=True):
        made.update("x", reward, rho=rho)
    assert made.counts("x") == close(tuple(expected["sequential"]))


def test_b01_advantages_are_z_scored_with_the_sample_deviation() -> None:
    inputs, expected = load("B01")
    raw = []
    for reward, alpha, beta in zip(inputs["r"], inputs["alpha"], inputs["beta"], strict=True):
        raw.append(reward - tracker(alpha, beta).update("x", reward))
    assert raw == close(expected["A"])
    assert normalize(np.array(raw)).tolist() == close(expected["A_norm"])


@pytest.mark.parametrize("case_id", ["B02", "B03"])
def test_equal_advantages_and_a_batch_of_one_become_zero(case_id: str) -> None:
    inputs, expected = load(case_id)
    normal = normalize(np.array(inputs["r"], float) - np.array(inputs["v"]))
    assert normal.tolist() == (expected["A_norm"] if case_id == "B02" else expected["recommended"])


def test_b04_advantages_weighted_by_model_tokens() -> None:
    inputs, expected = load("B04")
    raw, tokens = np.array(inputs["A"]), np.array(inputs["model_tokens"])
    normal = normalize(raw, tokens)
    assert normal.tolist() == close(expected["A_norm"])
    assert np.average(normal, weights=tokens) == close(expected["token_weighted_mean_after"])
    assert normalize(raw).tolist() == close(expected["trajectory_norm_for_comparison"])


def test_c01_weights_are_widest_where_success_is_a_coin_toss() -> None:
    inputs, expected = load("C01")
    values = np.array(inputs["v"])
    weights = selection_weights(values, np.ones(len(values)), SelectionConfig(epsilon=inputs["epsilon"]))
    assert weights.tolist() == close(expected["weights"])
    assert probabilities(weights).tolist() == close(expected["probs"])


def test_c02_unknown_prompts_weigh_nothing_unless_all_are_unknown() -> None:
    inputs, expected = load("C02")
    values = np.array([inputs["v"].get(prompt, np.nan) for prompt in inputs["prompts"]])
    weights = selection_weights(values, np.ones(3), SelectionConfig())
    assert weights.tolist() == close(expected["weights"])
    assert probabilities(weights).tolist() == close(expected["probs"])
    unknown = selection_weights(np.full(3, np.nan), np.ones(3), SelectionConfig())
    assert probabilities(unknown).tolist() == close(expected["all_unknown_probs"])
    rng = np.random.default_rng(0)
    assert {int(draw(unknown, 1, rng)[0]) for _ in range(100)} == {0, 1, 2}


def test_c03_well_known_prompts_may_be_held_back() -> None:
    inputs, expected = load("C03")
    config = SelectionConfig(gamma=inputs["gamma"], epsilon=inputs["epsilon"])
    weights = selection_weights(np.array(inputs["v"]), np.array(inputs["N_eff"], float), config)
    assert weights.tolist() == close(expected["weights"])
    assert probabilities(weights).tolist() == close(expected["probs"])
    made = ValueTracker(["a", "b", "c", "d"], TrackerConfig(), config)
    for i, (value, size) in enumerate(zip(inputs["v"], inputs["N_eff"], strict=True)):
        made.alpha[i], made.beta[i] = value * size, (1 - value) * size
    assert made.sampling_weights().tolist() == close(expected["weights"])


def test_c04_inclusion_probabilities_without_replacement() -> None:
    inputs, expected = load("C04")
    weights = selection_weights(np.array(inputs["v"]), np.ones(4), SelectionConfig(epsilon=inputs["epsilon"]))
    rng = np.random.default_rng(7)
    draws = np.array([draw(weights, inputs["k"], rng) for _ in range(40_000)])
    first = np.bincount(draws[:, 0], minlength=4) / len(draws)
    included = np.bincount(draws.ravel(), minlength=4) / len(draws)
    np.testing.assert_allclose(first, expected["first_draw"], atol=0.01)
    np.testing.assert_allclose(included, expected["inclusion"], atol=0.01)
