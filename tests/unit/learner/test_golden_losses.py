"""Losses and M2PO's mask against the code of verl, TRL and AReaL, and what is chosen among all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.config import AlgorithmConfig, CorrectionConfig
from learner.batch.layout import Layout
from learner.correction import Correction, correct
from learner.correction.ranking import largest, token_keys
from learner.losses import policy_loss
from tests.support.golden import LOSSES_FILE

CASES: list[dict[str, Any]] = LOSSES_FILE["cases"]
BY_LOSS = [(case, mode) for case in CASES for mode in case["expected"] if mode != "keep"]
M2PO = [case for case in CASES if case["name"] == "m2po"]
NAMES = [f"{case['name']}, {mode}, {number}" for number, (case, mode) in enumerate(BY_LOSS)]


def rows(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("case", "mode"), BY_LOSS, ids=NAMES)
def test_value_and_gradient_are_the_originals(case, mode):
    name, leaf = case["name"], rows(case["logprobs"]).requires_grad_()
    config = AlgorithmConfig(loss=name, loss_options=case["settings"], aggregation=mode)
    others = (rows(case[key]) for key in ("old", "advantages", "mask"))
    loss, _ = policy_loss(name, leaf, *others, config)
    loss.backward()
    expected = case["expected"][mode]
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-9, abs=1e-10)
    torch.testing.assert_close(leaf.grad, rows(expected["grad"]), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("case", M2PO, ids=range(len(M2PO)))
def test_the_mask_by_second_moment_is_the_originals(case):
    config = CorrectionConfig(rollout_is=None, m2_threshold=case["settings"]["threshold"])
    result = correct(rows(case["logprobs"]), rows(case["old"]), rows(case["mask"]), config)
    assert result.mask.int().tolist() == case["expected"]["keep"]


@pytest.mark.parametrize(("threshold", "left"), [(0.04, 1), (2.0, 6)])
def test_of_equal_second_moments_as_many_stay_as_fit(threshold, left):
    """At least one; AReaL masks by number too, not by value."""
    ones, config = torch.ones(2, 3).double(), CorrectionConfig(rollout_is=None, m2_threshold=threshold)
    result = correct(0 * ones, ones, ones, config)
    assert int(result.mask.sum()) == left
    assert result.metrics["rollout_corr/m2"] == 1
    assert result.metrics["rollout_corr/m2_masked_fraction"] == pytest.approx(1 - left / 6)


def test_a_token_without_finite_logprobs_is_in_no_second_moment():
    old = rows([[0.0, 0.1, torch.nan]])
    result = correct(
        old, rows([[0.3, 0.1, 0.0]]), torch.ones(1, 3), CorrectionConfig(rollout_is=None, m2_threshold=0.04)
    )
    # With the third token as a zero the mean would be 0.03.
    assert result.mask.tolist() == [[False, True, False]]


def chosen_by(loss: str, batch: dict[str, torch.Tensor], **options: float) -> torch.Tensor:
    """The tokens that are treated otherwise than without a choice, bool [B, T]: those whose gradient differs."""
    gradients = []
    for ratio in (options["ratio"], 1e-9):
        leaf = batch["logprobs"].clone().requires_grad_()
        config = AlgorithmConfig(loss=loss, loss_options=options | {"ratio": ratio})
        loss_value, _ = policy_loss(loss, leaf, batch["old"], batch["advantages"], batch["mask"], config)
        loss_value.backward()
        gradients.append(leaf.grad)
    return gradients[0] != gradients[1]


def wide_rows() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    old = -3 * torch.rand(6, 50, dtype=torch.float64)
    advantages = torch.randn(6, 1, dtype=torch.float64).expand(6, 50)
    return {
        "logprobs": old + 0.05 * torch.randn(6, 50, dtype=torch.float64),
        "old": old,
        "advantages": advantages,
        "mask": torch.ones(6, 50, dtype=torch.bool),
    }


def test_clip_covs_draw_is_a_share_and_the_same_again():
    batch, options = wide_rows(), {"cov_low": -1.0, "cov_high": 1.0, "low": 9.0, "high": 9.0}
    first = chosen_by("clip_cov", batch, ratio=0.1, **options)
    assert 28 <= int(first.sum()) <= 30, "a tenth of 300, but for the one that is always drawn"
    assert torch.equal(first, chosen_by("clip_cov", batch, ratio=0.1, **options))
    order = torch.tensor([5, 2, 0, 1, 4, 3])
    moved = {key: values[order] for key, values in batch.items()}
    assert torch.equal(chosen_by("clip_cov", moved, ratio=0.1, **options), first[order])
    # Other rows have other draws.
    assert len({tuple(row) for row in first.tolist()}) == 6


def test_keys_depend_on_the_row_alone():
    torch.manual_seed(0)
    rollout = -torch.rand(9)
    keys = token_keys(rollout, Layout.of_lengths([4, 0, 5]))
    assert len(set(keys.tolist())) == 9
    assert torch.equal(token_keys(rollout[4:], Layout.of_lengths([5])), keys[4:])
    # Two equal rows have equal keys, and equal places in a row have others.
    twice = token_keys(torch.zeros(6), Layout.of_lengths([3, 3]))
    assert torch.equal(twice[:3], twice[3:])
    assert len(set(twice.tolist())) == 3


def test_ties_go_to_the_smaller_key():
    values, keys = torch.tensor([1.0, 2.0, 1.0, 1.0]), torch.tensor([3.0, 9.0, 1.0, 2.0])
    assert largest(values, keys, 3).tolist() == [1, 2, 3]


@pytest.mark.parametrize(("level", "product"), [("token", 1.2 * 0.5 * 2.0), ("sequence", 1.5)])
def test_vespos_row_ratio_takes_the_rows_weight(level, product):
    """By token it is the product of the weights, by row the one weight that all tokens have."""
    weights = rows([[1.2, 0.5, 2.0]]) if level == "token" else torch.full((1, 3), 1.5).double()
    config = AlgorithmConfig(loss="vespo", correction={"rollout_is": level})
    zeros, ones = torch.zeros(1, 3).double(), torch.ones(1, 3).double()
    leaf = zeros.clone().requires_grad_()
    loss, metrics = policy_loss("vespo", leaf, zeros, ones, ones, config, Correction(weights, ones.bool()))
    loss.backward()
    phi = product**2 * torch.tensor(3 * (1 - product)).exp()
    assert metrics["actor/vespo_weight"] == pytest.approx(float(phi))
    torch.testing.assert_close(leaf.grad, -phi.double().expand(1, 3) / 3)


def test_prompt_mean_weighs_the_tokens_of_a_prompt_alike():
    """Rows of 1 and 3 tokens answer one prompt, rows of 2 and 2 another; each loss is the place of its token."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 0]])
    logprobs = -rows([[1, 0, 0], [2, 3, 4], [5, 6, 0], [7, 8, 0]])
    config = AlgorithmConfig(
        loss="reinforce", method="rloo", group_size=2, aggregation="prompt-mean", correction={"rollout_is": None}
    )
    ones = torch.ones(4, 3).double()
    loss, _ = policy_loss("reinforce", logprobs, logprobs, ones, mask, config)
    assert float(loss) == pytest.approx(((1 + 2 + 3 + 4) / 4 + (5 + 6 + 7 + 8) / 4) / 2)
    alone, _ = policy_loss("reinforce", logprobs, logprobs, ones, mask, config.model_copy(update={"method": "spo"}))
    assert float(alone) == pytest.approx((1 + 3 + 5.5 + 7.5) / 4)
