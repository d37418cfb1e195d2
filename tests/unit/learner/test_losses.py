"""Losses and aggregation against golden values, and what must hold for any batch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from common.config import AlgorithmConfig, CorrectionConfig
from learner.correction import Correction, correct
from learner.losses import LOSSES, Denominators, aggregate, policy_loss
from learner.stats import Stats
from learner.step_loss import PolicyOutput, Precomputed, TrainPosition, step_loss
from tests.support.learner import tokens_of_rows

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[2] / "golden" / "spo_golden.json").read_text(encoding="utf-8"))[
        "cases"
    ]
}
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def tensors(case: dict) -> dict[str, torch.Tensor]:
    names = ("log_prob", "old_log_prob", "advantages", "mask")
    return {name: torch.tensor(case["inputs"][name], dtype=torch.float64) for name in names}


def loss_of(inputs: dict, config: AlgorithmConfig, correction: Correction | None = None, name: str = "ppo_clip"):
    return policy_loss(
        name, inputs["log_prob"], inputs["old_log_prob"], inputs["advantages"], inputs["mask"], config, correction
    )


@pytest.mark.parametrize("name", ["H01", "H02"])
def test_dual_clip_ppo_is_golden(name):
    case = CASES[name]
    inputs = case["inputs"]
    config = AlgorithmConfig(clip_low=inputs["clip_low"], clip_high=inputs["clip_high"], clip_dual=inputs["clip_c"])
    loss, metrics = loss_of(tensors(case), config)
    assert loss.item() == pytest.approx(case["expected"]["loss"], rel=1e-6)
    for key, value in case["expected"]["metrics"].items():
        assert metrics[key] == pytest.approx(value, rel=1e-6)


def test_importance_weights_multiply_the_token_losses_as_golden():
    case, inputs = CASES["H03"], tensors(CASES["H01"])
    log_ratio = torch.tensor(case["inputs"]["log_ratio_old_vs_rollout"], dtype=torch.float64)
    correction = correct(
        inputs["old_log_prob"],
        inputs["old_log_prob"] - log_ratio,
        inputs["mask"],
        CorrectionConfig(rollout_is="sequence", rollout_is_threshold=case["inputs"]["threshold"]),
    )
    torch.testing.assert_close(
        correction.weights, torch.tensor(case["expected"]["weights"], dtype=torch.float64), rtol=1e-6, atol=0
    )
    loss, _ = loss_of(inputs, AlgorithmConfig(), correction)
    assert loss.item() == pytest.approx(case["expected"]["loss"], rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_is_golden(mode):
    case = CASES["H04"]
    values = torch.tensor(case["inputs"]["loss"], dtype=torch.float64)
    mask = torch.tensor(case["inputs"]["mask"]).bool()
    assert aggregate(values, mask, mode, Denominators.of(mask)).item() == pytest.approx(
        case["expected"][mode], rel=1e-6
    )


@pytest.mark.parametrize("mode", MODES)
def test_h05_where_everything_is_rejected_the_loss_is_zero_and_not_nan(mode):
    inputs = tensors(CASES["H01"])
    nothing = torch.zeros_like(inputs["mask"]).bool()
    assert aggregate(inputs["log_prob"], nothing, mode, Denominators.of(nothing)).item() == 0
    config = AlgorithmConfig(aggregation=mode)
    for loss in LOSSES:
        leaf = inputs["log_prob"].clone().requires_grad_()
        rejected = Correction(torch.ones_like(inputs["mask"]), nothing)
        rejected_loss, metrics = loss_of(inputs | {"log_prob": leaf}, config, rejected, loss)
        rejected_loss.backward()
        assert rejected_loss.item() == 0
        assert not leaf.grad.any()
        assert all(math.isfinite(value) for value in metrics.values())


def bypassed(name: str) -> tuple[dict, dict[str, torch.Tensor], AlgorithmConfig, Correction]:
    """A golden case of bypass mode: its expectations, values, configuration, and correction of the current policy."""
    case, inputs = CASES[name], tensors(CASES["H01"])
    fields = {key: case["inputs"][key] for key in ("rollout_rs", "rollout_rs_threshold") if key in case["inputs"]}
    fields |= {"rollout_is": case["inputs"]["rollout_is"], "loss_type": case["inputs"]["loss_type"]}
    config = AlgorithmConfig(correction={"bypass_mode": True, **fields})
    correction = correct(inputs["log_prob"], inputs["old_log_prob"], inputs["mask"], config.correction)
    return case["expected"], inputs, config, correction


def test_h06_policy_gradient_in_bypass_mode_is_weighted_by_the_row():
    expected, inputs, config, correction = bypassed("H06")
    assert config.weighs_loss
    weights = torch.tensor(expected["weights"], dtype=torch.float64)
    torch.testing.assert_close(correction.weights, weights, rtol=1e-6, atol=0)
    loss, metrics = loss_of(inputs, config, correction, config.loss)
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    assert metrics["actor/ppo_kl"] == pytest.approx(expected["actor/ppo_kl"], rel=1e-6)


def test_h07_ppo_in_bypass_mode_is_masked_and_its_weights_are_measured_only():
    expected, inputs, config, correction = bypassed("H07")
    assert not config.weighs_loss
    assert correction.mask.int().tolist() == expected["mask"]
    assert correction.metrics["rollout_corr/rollout_is_max"] > 1
    loss, _ = loss_of(inputs, config, Correction(None, correction.mask), config.loss)
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.parametrize("name", ["H06", "H07"])
def test_the_learners_objective_is_golden_in_bypass_mode(name):
    expected, inputs, config, correction = bypassed(name)
    mask = inputs["mask"].bool()
    before, after = Denominators.of(mask), Denominators.of(correction.mask)
    tokens = [inputs[key][mask] for key in ("log_prob", "old_log_prob", "advantages")]
    micro = tokens_of_rows(mask.sum(1).tolist(), *tokens[1:])
    policy = PolicyOutput(tokens[0], torch.zeros_like(tokens[0]))
    position = TrainPosition(0, 0, 1, before)
    step = step_loss(micro, policy, Precomputed(), position, LOSSES[config.loss], config, Stats())
    factor = before.rescale(after.tokens, after.rows, config.aggregation)
    assert step.loss.item() * factor == pytest.approx(expected["loss"], rel=1e-6)


def test_clipped_tokens_have_no_gradient():
    logprobs = torch.tensor([[0.5, -0.5, 0.1]], requires_grad=True)
    advantages = torch.tensor([[1.0, -1.0, 1.0]])
    loss, metrics = policy_loss(
        "ppo_clip", logprobs, torch.zeros(1, 3), advantages, torch.ones(1, 3), AlgorithmConfig()
    )
    loss.backward()
    assert (logprobs.grad != 0).tolist() == [[False, False, True]]
    assert metrics["actor/clip_high"] == pytest.approx(1 / 3)
    assert metrics["actor/clip_low"] == pytest.approx(1 / 3)


def test_unknown_names_and_shapes_are_refused_with_what_is_allowed():
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"'ppo' is unknown; allowed: ppo_clip"):
        policy_loss("ppo", ones, ones, ones, ones, AlgorithmConfig())
    with pytest.raises(ValueError, match="token-mean"):
        aggregate(ones, ones.bool(), "mean", Denominators(1, 1, 1))
    with pytest.raises(ValueError, match=r"must all be \[B, T\]"):
        policy_loss("ppo_clip", ones, ones, torch.ones(2), ones, AlgorithmConfig())


def test_cispo_without_a_lower_bound_keeps_small_ratios_as_they_are():
    """verl's example switches the bound off with 10, SkyRL's default band is [0, 5]: clip_low 1, clip_high 4."""
    logprobs = torch.tensor([[-3.0, 0.0, 3.0]], dtype=torch.float64, requires_grad=True)
    for clip_low in (1.0, 10.0):
        config = AlgorithmConfig(loss="cispo", clip_low=clip_low, clip_high=4.0)
        zeros, ones = torch.zeros(1, 3).double(), torch.ones(1, 3).double()
        loss, _ = policy_loss("cispo", logprobs, zeros, ones, ones, config)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        ratios = [math.exp(-3.0), 1.0, 5.0]
        assert gradient[0].tolist() == pytest.approx([-ratio / 3 for ratio in ratios])


@pytest.mark.parametrize("skyrl", [True, False])
def test_gspos_row_mean_is_skyrls_before_its_mask_and_verls_after(skyrl):
    log_ratios = [0.1, 0.2, 3.0]
    logprobs = torch.tensor([log_ratios], dtype=torch.float64, requires_grad=True)
    zeros, ones = torch.zeros(1, 3).double(), torch.ones(1, 3).double()
    mask = torch.tensor([[True, True, False]])
    correction = {"skyrl": {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}}
    config = AlgorithmConfig(loss="gspo", clip_high=9.0, **({"correction": correction} if skyrl else {}))
    loss, _ = policy_loss("gspo", logprobs, zeros, ones, ones, config, Correction(None, mask))
    counted = log_ratios if skyrl else log_ratios[:2]
    ratio = math.exp(sum(counted) / len(counted))
    # The loss is -ratio of each token that is left, averaged over the tokens the row is divided by.
    assert loss.item() == pytest.approx(-ratio * 2 / len(counted))
