"""Losses and aggregation against golden values, and what must hold for any batch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from common.config import AlgorithmConfig, CorrectionConfig
from learner.correction import Correction, correct
from learner.losses import Denominators, aggregate, policy_loss

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


def loss_of(given: dict, config: AlgorithmConfig, correction: Correction | None = None):
    return policy_loss(
        "ppo_clip", given["log_prob"], given["old_log_prob"], given["advantages"], given["mask"], config, correction
    )


@pytest.mark.parametrize("name", ["H01", "H02"])
def test_dual_clip_ppo_is_golden(name):
    case = CASES[name]
    given = case["inputs"]
    config = AlgorithmConfig(clip_low=given["clip_low"], clip_high=given["clip_high"], clip_dual=given["clip_c"])
    loss, metrics = loss_of(tensors(case), config)
    assert loss.item() == pytest.approx(case["expected"]["loss"], rel=1e-6)
    for key, value in case["expected"]["metrics"].items():
        assert metrics[key] == pytest.approx(value, rel=1e-6)


def test_importance_weights_multiply_the_token_losses_as_golden():
    case, given = CASES["H03"], tensors(CASES["H01"])
    log_ratio = torch.tensor(case["inputs"]["log_ratio_old_vs_rollout"], dtype=torch.float64)
    correction = correct(
        given["old_log_prob"],
        given["old_log_prob"] - log_ratio,
        given["mask"],
        CorrectionConfig(rollout_is="sequence", rollout_is_threshold=case["inputs"]["threshold"]),
    )
    torch.testing.assert_close(
        correction.weights, torch.tensor(case["expected"]["weights"], dtype=torch.float64), rtol=1e-6, atol=0
    )
    loss, _ = loss_of(given, AlgorithmConfig(), correction)
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
def test_an_empty_mask_gives_zero_loss_and_zero_gradient(mode):
    logprobs = torch.randn(2, 3, requires_grad=True)
    loss, metrics = policy_loss(
        "ppo_clip",
        logprobs,
        torch.zeros(2, 3),
        torch.ones(2, 3),
        torch.zeros(2, 3),
        AlgorithmConfig(aggregation=mode),
    )
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logprobs.grad, torch.zeros(2, 3))
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("mode", MODES)
def test_nan_in_masked_places_reaches_neither_loss_nor_gradient(mode):
    torch.manual_seed(0)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    clean = [torch.randn(2, 3) for _ in range(4)]
    dirty = [torch.where(mask, value, torch.nan) for value in clean]
    found = []
    for logprobs, old, advantages, weights in (clean, dirty):
        leaf = logprobs.clone().requires_grad_()
        loss, _ = policy_loss(
            "ppo_clip", leaf, old, advantages, mask, AlgorithmConfig(aggregation=mode), Correction(weights.abs(), mask)
        )
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("mode", MODES)
def test_losses_and_metrics_of_parts_add_up_with_global_denominators(mode):
    torch.manual_seed(1)
    mask = torch.rand(6, 5) < 0.6
    mask[4] = False
    logprobs, old, advantages = torch.randn(6, 5), torch.randn(6, 5), torch.randn(6, 5)
    config = AlgorithmConfig(aggregation=mode)
    whole, metrics = policy_loss("ppo_clip", logprobs, old, advantages, mask, config)
    parts = [
        policy_loss(
            "ppo_clip", logprobs[i:j], old[i:j], advantages[i:j], mask[i:j], config, None, Denominators.of(mask)
        )
        for i, j in ((0, 1), (1, 4), (4, 6))
    ]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    for name, value in metrics.items():
        assert sum(part[name] for _, part in parts) == pytest.approx(value, rel=1e-5, abs=1e-6)


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
