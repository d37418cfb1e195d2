"""Truncated importance weights and diagnostics against golden values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from learner.correction import CorrectionConfig, correct

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "spo_golden.json").read_text(encoding="utf-8"))
CASES = {case["id"]: case for case in GOLDEN["cases"]}


def fixture(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = GOLDEN["fixtures"][name]
    return tuple(
        torch.tensor(values[key], dtype=torch.float64) for key in ("old_log_prob", "rollout_log_prob", "response_mask")
    )


@pytest.mark.parametrize("name", ["D01", "D02", "D04", "D05"])
def test_weights_and_their_statistics_are_golden(name):
    case = CASES[name]
    given = case["inputs"]
    config = CorrectionConfig(rollout_is=given["level"], rollout_is_threshold=given["threshold"])
    found = correct(*fixture(given["fixture"]), config)
    torch.testing.assert_close(
        found.weights, torch.tensor(case["expected"]["weights"], dtype=torch.float64), rtol=1e-6, atol=1e-9
    )
    statistics = ["mean", "std", "eff_sample_size"]
    if given["fixture"] == "A":
        # On fixture B the public implementation counts its empty row as ratio 1 in these.
        statistics += ["max", "min"]
    for key in statistics:
        expected = case["expected"]["metrics"][f"rollout_is_{key}"]
        assert found.metrics[f"rollout_corr/rollout_is_{key}"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("name", "keys"), [("F01", ("kl", "k3_kl", "chi2_token")), ("F02", ("kl", "k3_kl"))])
def test_diagnostics_are_golden(name, keys):
    case = CASES[name]
    found = correct(*fixture(case["inputs"]["fixture"]), CorrectionConfig())
    for key in keys:
        assert found.metrics[f"rollout_corr/{key}"] == pytest.approx(case["expected"][key], rel=1e-6)


def test_log_ratios_are_bounded_at_20():
    case = CASES["D08"]
    log_ratio = torch.tensor(case["inputs"]["log_ratio"], dtype=torch.float64)
    for level in ("token", "sequence"):
        config = CorrectionConfig(rollout_is=level, rollout_is_threshold=case["inputs"]["threshold"])
        found = correct(log_ratio, torch.zeros_like(log_ratio), torch.ones_like(log_ratio), config)
        expected = torch.tensor(case["expected"][f"{level}_weights"], dtype=torch.float64)
        torch.testing.assert_close(found.weights, expected, rtol=1e-6, atol=1e-12)


def test_nan_in_masked_places_gives_weight_zero():
    case = CASES["D09"]
    log_ratio = torch.tensor([[float(value) for value in row] for row in case["inputs"]["log_ratio"]])
    mask = torch.tensor(case["inputs"]["mask"])
    for level in ("token", "sequence"):
        found = correct(log_ratio, torch.zeros_like(log_ratio), mask, CorrectionConfig(rollout_is=level))
        assert torch.isfinite(found.weights).all()
        if level == "token":
            torch.testing.assert_close(found.weights, torch.tensor(case["expected"]["recommended"]))


def test_weights_carry_no_gradient():
    old = torch.zeros(1, 2, requires_grad=True)
    assert not correct(old, torch.zeros(1, 2), torch.ones(1, 2), CorrectionConfig()).weights.requires_grad


def test_without_a_level_there_are_no_weights_and_the_gap_is_still_told():
    found = correct(*fixture("A"), CorrectionConfig(rollout_is=None))
    assert found.weights is None
    assert "rollout_corr/kl" in found.metrics
    assert "rollout_corr/rollout_is_mean" not in found.metrics


def test_an_empty_mask_is_no_error():
    found = correct(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), CorrectionConfig())
    assert found.metrics == {}
    assert torch.equal(found.weights, torch.zeros(2, 3))


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"\[B, T\]; given \[2, 3\], \[2, 2\], \[2, 3\]"):
        correct(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2, 3), CorrectionConfig())
