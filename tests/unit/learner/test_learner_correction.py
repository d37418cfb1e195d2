"""What a correction is for any batch; the golden values are in test_correction_golden.py."""

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


def test_nan_in_masked_places_gives_weight_zero():
    case = CASES["D09"]
    log_ratio = torch.tensor([[float(value) for value in row] for row in case["inputs"]["log_ratio"]])
    mask = torch.tensor(case["inputs"]["mask"])
    for level in ("token", "sequence"):
        result = correct(log_ratio, torch.zeros_like(log_ratio), mask, CorrectionConfig(rollout_is=level))
        assert torch.isfinite(result.weights).all()
        if level == "token":
            torch.testing.assert_close(result.weights, torch.tensor(case["expected"]["recommended"]))


def test_weights_carry_no_gradient():
    old = torch.zeros(1, 2, requires_grad=True)
    assert not correct(old, torch.zeros(1, 2), torch.ones(1, 2), CorrectionConfig()).weights.requires_grad


def test_without_a_level_there_are_no_weights_and_the_gap_is_still_told():
    result = correct(*fixture("A"), CorrectionConfig(rollout_is=None))
    assert result.weights is None
    assert "rollout_corr/kl" in result.metrics
    assert "rollout_corr/rollout_is_mean" not in result.metrics


def test_an_empty_mask_is_no_error():
    result = correct(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), CorrectionConfig())
    assert result.metrics == {}
    assert torch.equal(result.weights, torch.zeros(2, 3))


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"\[B, T\]; given .*rollout_logprobs \[2, 2\]"):
        correct(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2, 3), CorrectionConfig())
