"""Policy losses, aggregation and M2PO's mask against golden values, the originals' code and plain formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from common.config import AlgorithmConfig, CorrectionConfig
from learner.batch.layout import Layout
from learner.correction import BATCH_NORM_FACTOR, Correction, correct
from learner.correction.ranking import largest, token_keys
from learner.losses import LOSSES, Denominators, aggregate, policy_loss
from learner.losses.aggregation import aggregate_tokens
from learner.stats import Stats
from learner.step_loss import PolicyOutput, Precomputed, TrainPosition, reference_kl, step_loss
from tests.support.golden import GOLDEN, LOSSES_FILE
from tests.support.learner import tokens_of_rows
from tests.support.plain_losses import PLAIN, plain_loss

GOLDEN_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
MODES = (*GOLDEN_MODES, "token-sum", "prompt-mean")
LENGTHS = [3, 0, 5, 1, 4]
# Options that a loss must be given, or with which a few tokens are enough. With a ratio of 1 nothing is left to a draw.
OPTIONS: dict[str, dict[str, float]] = {
    "dro": {"beta": 0.5},
    "clip_cov": {"ratio": 1.0, "cov_low": 0.1, "cov_high": 0.9},
    "kl_cov": {"ratio": 0.3, "coef": 0.7},
}
WIDTH = 6
# Every loss, and every aggregation of one of them.
KINDS = [*((name, "token-mean") for name in LOSSES), *(("ppo_clip", mode) for mode in MODES[1:])]
Tensors = dict[str, torch.Tensor]


def config_of(name: str, **fields: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**{"loss": name, "loss_options": OPTIONS.get(name, {}), **fields})


def golden(name: str = "H01") -> Tensors:
    names = {"logprobs": "log_prob", "old": "old_log_prob", "advantages": "advantages", "mask": "mask"}
    values = GOLDEN[name]["inputs"]
    return {ours: torch.tensor(values[theirs], dtype=torch.float64) for ours, theirs in names.items()}


def rows(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_rows(scale: float = 0.5, dtype: torch.dtype = torch.float64) -> Tensors:
    """Rows of LENGTHS with log-probs that are about `scale` apart; advantages one a row, of both signs."""
    torch.manual_seed(0)
    shape = (len(LENGTHS), WIDTH)
    old = -3 * torch.rand(shape, dtype=dtype)
    return {
        "logprobs": old + scale * torch.randn(shape, dtype=dtype),
        "old": old,
        "rollout": old + scale * torch.randn(shape, dtype=dtype),
        "advantages": torch.tensor([1.3, 0.4, -0.7, -1.6, 0.9], dtype=dtype)[:, None].expand(shape).clone(),
        "mask": torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None],
        "weights": 2 * torch.rand(shape, dtype=dtype),
    }


def without(mask: torch.Tensor, *places: tuple[int, int]) -> torch.Tensor:
    keep = mask.clone()
    for place in places:
        keep[place] = False
    return keep


def loss_of(
    batch: Tensors, config: AlgorithmConfig, correction: Correction | None = None, name: str = "ppo_clip"
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """The loss of padded rows, its gradient and metrics."""
    leaf = batch["logprobs"].clone().requires_grad_()
    values = (batch[key] for key in ("old", "advantages", "mask"))
    loss, metrics = policy_loss(name, leaf, *values, config, correction, None, batch.get("rollout"))
    loss.backward()
    return loss.item(), leaf.grad, metrics


@pytest.mark.parametrize("name", ["H01", "H02"])
def test_dual_clip_ppo_is_golden(name):
    inputs, expected = GOLDEN[name]["inputs"], GOLDEN[name]["expected"]
    options = {"low": inputs["clip_low"], "high": inputs["clip_high"], "cap": inputs["clip_c"]}
    loss, _, metrics = loss_of(golden(name), AlgorithmConfig(loss_options=options))
    assert loss == pytest.approx(expected["loss"], rel=1e-6)
    assert {key: metrics[key] for key in expected["metrics"]} == pytest.approx(expected["metrics"], rel=1e-6)


def test_importance_weights_are_golden():
    case, batch = GOLDEN["H03"], golden()
    rollout = batch["old"] - rows(case["inputs"]["log_ratio_old_vs_rollout"])
    config = CorrectionConfig(rollout_is="sequence", rollout_is_threshold=case["inputs"]["threshold"])
    correction = correct(batch["old"], rollout, batch["mask"], config)
    torch.testing.assert_close(correction.weights, rows(case["expected"]["weights"]), rtol=1e-6, atol=0)
    assert loss_of(batch, AlgorithmConfig(), correction)[0] == pytest.approx(case["expected"]["loss"], rel=1e-6)


@pytest.mark.parametrize("name", ["H06", "H07"])
def test_bypass_mode_is_golden(name):
    """H06 weighs a policy gradient by its rows; H07 masks PPO, and only measures its weights."""
    inputs, expected, batch = GOLDEN[name]["inputs"], GOLDEN[name]["expected"], golden()
    names = ("rollout_rs", "rollout_rs_threshold", "rollout_is")
    fields = {key: inputs[key] for key in names if key in inputs}
    config = AlgorithmConfig(proximal="rollout", loss=inputs["loss_type"], correction={"rollout_is": None, **fields})
    correction = correct(batch["logprobs"], batch["old"], batch["mask"], config.correction)
    weights, keep = correction.weights, correction.mask
    assert config.weighs_loss == (name == "H06")
    if config.weighs_loss:
        torch.testing.assert_close(weights, rows(expected["weights"]), rtol=1e-6, atol=0)
    else:
        assert keep.int().tolist() == expected["mask"]
        assert correction.metrics["rollout_corr/rollout_is_max"] > 1
    loss, _, metrics = loss_of(batch, config, Correction(weights if config.weighs_loss else None, keep), config.loss)
    assert loss == pytest.approx(expected["loss"], rel=1e-6)
    assert metrics["actor/ppo_kl"] == pytest.approx(expected.get("actor/ppo_kl", metrics["actor/ppo_kl"]), rel=1e-6)
    stepped, _ = loss_of_step(batch | {"rollout": batch["old"]}, config, keep)
    assert stepped == pytest.approx(expected["loss"], rel=1e-6)


def loss_of_step(
    batch: Tensors, config: AlgorithmConfig, kept: torch.Tensor, weight_mean: float = 1.0
) -> tuple[float, torch.Tensor]:
    """The same as the learner computes it, on model tokens alone: the loss, and its gradient [N]."""
    mask = batch["mask"].bool()
    tokens = {key: values[mask] for key, values in batch.items()}
    leaf = tokens["logprobs"].clone().requires_grad_()
    micro = tokens_of_rows(mask.sum(1).tolist(), tokens["rollout"], tokens["advantages"])
    before, left = Denominators.of(mask), Denominators.of(kept)
    precomputed = Precomputed(tokens["old"] if config.proximal == "recompute" else None, weight_mean=weight_mean)
    policy, position = PolicyOutput(leaf, torch.zeros_like(leaf)), TrainPosition(1, 0, 1, before)
    loss = step_loss(micro, policy, precomputed, position, LOSSES[config.loss], config, Stats()).loss
    loss = loss * before.rescale(left.tokens, left.samples, config.aggregation)
    loss.backward()
    return loss.item(), leaf.grad


@pytest.mark.parametrize(("name", "mode"), KINDS)
def test_the_learners_step_is_the_loss_of_padded_rows(name, mode):
    rejecting = {"rollout_rs": "token_k1,seq_mean_k1", "rollout_rs_threshold": "0.4_2.2,0.7_1.5"}
    weighing = {"rollout_is": "token", "rollout_is_batch_normalize": True, **rejecting}
    config = config_of(name, aggregation=mode, correction=weighing)
    batch = random_rows()
    correction = correct(batch["old"], batch["rollout"], batch["mask"], config.correction)
    assert 0 < correction.mask.sum() < batch["mask"].sum()
    mean = correction.metrics[BATCH_NORM_FACTOR]
    assert abs(mean - 1) > 0.05
    expected, gradient, _ = loss_of(batch, config, correction, name)
    loss, of_tokens = loss_of_step(batch, config, correction.mask, mean)
    assert loss == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(of_tokens, gradient[batch["mask"]], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(("proximal", "loss", "weighs"), [
    ("rollout", "ppo_clip", False), ("rollout", "gspo", False), ("rollout", "reinforce", True),
    ("recompute", "ppo_clip", True),
])  # fmt: skip
def test_bypass_weighs_only_losses_without_a_ratio(proximal, loss, weighs):
    """There the ratio is the importance weight already, in the public function as in the learner's step."""
    batch, config = random_rows(), AlgorithmConfig(proximal=proximal, loss=loss)
    weighted, plain = (loss_of(batch, config, Correction(w, batch["mask"]), loss) for w in (batch["weights"], None))
    assert (weighted[0] != plain[0]) == weighs
    assert torch.equal(weighted[1], plain[1]) != weighs


@pytest.mark.parametrize("mode", GOLDEN_MODES)
def test_aggregation_is_golden(mode):
    case = GOLDEN["H04"]
    mask = rows(case["inputs"]["mask"]).bool()
    loss = aggregate(rows(case["inputs"]["loss"]), mask, mode, Denominators.of(mask))
    assert loss.item() == pytest.approx(case["expected"][mode], rel=1e-6)


@pytest.mark.parametrize(("name", "mode"), KINDS)
def test_where_everything_is_rejected_the_loss_is_zero(name, mode):
    """H05."""
    batch = golden()
    nothing = torch.zeros_like(batch["mask"]).bool()
    rejected = Correction(torch.ones_like(batch["mask"]), nothing)
    loss, gradient, metrics = loss_of(batch, config_of(name, aggregation=mode), rejected, name)
    assert loss == aggregate(batch["logprobs"], nothing, mode, Denominators.of(nothing)).item() == 0
    assert not gradient.any()
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(("name", "mode"), [kind for kind in KINDS if kind[0] in PLAIN])
@pytest.mark.parametrize(("scale", "low"), [(0.5, 0.2), (3.0, 10.0)])
def test_loss_and_gradient_are_those_of_the_plain_formula(name, mode, scale, low):
    """With a lower clip of 10 verl's example of CISPO switches that bound off."""
    bounds = {
        **{key: {"low": low} for key in ("gspo", "cispo", "clip_cov")},
        "ppo_clip": {"low": low, "cap": 3.0},
        "sapo": {"tau_pos": 0.75, "tau_neg": 1.75},
        "double_sided": {"low": 0.6, "high": 1.5},
    }
    config = config_of(name, aggregation=mode, loss_options=OPTIONS.get(name, {}) | bounds.get(name, {}))
    batch = random_rows(scale)
    if scale == 0.5:
        batch["advantages"][:, 2:] *= -0.5  # turns of one row have advantages of both signs
    keep = without(batch["mask"], (2, 1), (4, 0), (3, 0))
    loss, gradient, _ = loss_of(batch, config, Correction(batch["weights"], keep), name)
    leaf = batch["logprobs"].clone().requires_grad_()
    expected = plain_loss(name, leaf, batch, keep, config)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-10, atol=1e-14)
    assert bool((gradient != 0).any()) or (name in ("double_sided", "gspo", "geo_mean") and scale == 3.0)


def test_metrics_count_the_tokens_that_a_bound_holds():
    logprobs = torch.tensor([[0.5, -0.5, 0.1, 0.6, 2.0]])
    ones = torch.ones_like(logprobs)
    batch = {"logprobs": logprobs, "old": 0 * ones, "mask": ones, "advantages": ones * torch.tensor([1, -1, 1, 1, -1])}
    metrics = {
        name: loss_of(batch, config_of(name, loss_options={"cap": 1.5} if name == "ppo_clip" else {}), name=name)[2]
        for name in ("ppo_clip", "cispo", "sapo")
    }
    of_ppo = {"pg_clipfrac": 0.6, "clip_high": 0.4, "clip_low": 0.2, "pg_clipfrac_lower": 0.2}
    assert {name: metrics["ppo_clip"][f"actor/{name}"] for name in of_ppo} == pytest.approx(of_ppo)
    assert metrics["cispo"]["actor/clip_high"] == pytest.approx(0.6)
    assert metrics["cispo"]["actor/clip_low"] == pytest.approx(0.2)
    far = loss_of(random_rows(), AlgorithmConfig(), name="double_sided")[2]
    assert far["actor/band_low"] > 0
    assert loss_of(random_rows(), AlgorithmConfig(), name="gspo")[2]["actor/pg_clipfrac"] > 0
    assert 0 < metrics["sapo"]["actor/gate_slope"] < 1


@pytest.mark.parametrize("name", LOSSES)
def test_masked_and_rejected_junk_reaches_nothing(name):
    batch = random_rows()
    keep = without(batch["mask"], (2, 1))
    clean = loss_of(batch, config_of(name), Correction(batch["weights"], keep), name)
    dirty = {key: values if key == "mask" else torch.where(keep, values, torch.nan) for key, values in batch.items()}
    loss, gradient, metrics = loss_of(dirty, config_of(name), Correction(dirty["weights"], keep), name)
    assert (loss, metrics) == (clean[0], clean[2])
    assert torch.equal(gradient, clean[1])


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_log_ratios_give_finite_losses_and_gradients(name):
    batch = random_rows(dtype=torch.float32)
    correction = correct(batch["old"], batch["rollout"], batch["mask"], CorrectionConfig(rollout_is="token"))
    for size in (-1e4, -30.0, 30.0, 1e4):
        batch["logprobs"] = batch["old"] + size
        loss, gradient, metrics = loss_of(batch, config_of(name), correction, name)
        assert all(math.isfinite(value) for value in (loss, *metrics.values()))
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("skyrl", [True, False])
def test_gspos_row_mean_is_skyrls_or_verls(skyrl):
    log_ratios = [0.1, 0.2, 3.0]
    zeros, ones = torch.zeros(1, 3).double(), torch.ones(1, 3).double()
    correction = {"skyrl": {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}}
    config = AlgorithmConfig(loss="gspo", loss_options={"high": 9.0}, **({"correction": correction} if skyrl else {}))
    batch = {"logprobs": rows([log_ratios]), "old": zeros, "advantages": ones, "mask": ones}
    loss, _, _ = loss_of(batch, config, Correction(None, torch.tensor([[True, True, False]])), "gspo")
    counted = log_ratios if skyrl else log_ratios[:2]
    # The loss is -ratio of each token that is left, averaged over the tokens the row is divided by.
    assert loss == pytest.approx(-math.exp(sum(counted) / len(counted)) * 2 / len(counted))


def test_unknown_names_and_shapes_are_refused():
    ones, config = torch.ones(1, 2), AlgorithmConfig()
    with pytest.raises(ValueError, match="'ppo' is unknown; allowed: ppo_clip"):
        policy_loss("ppo", ones, ones, ones, ones, config)
    with pytest.raises(ValueError, match=r"must all be \[B, T\]"):
        policy_loss("ppo_clip", ones, ones, ones[0], ones, config)
    with pytest.raises(ValueError, match="token-mean"):
        aggregate(ones, ones.bool(), "mean", Denominators(1, 1, 1))
    with pytest.raises(ValueError, match="'k4' is unknown; allowed: k1, k2, k3, low_var_kl, abs"):
        reference_kl(ones[0], ones[0], "k4")


CASES: list[dict[str, Any]] = LOSSES_FILE["cases"]
BY_LOSS = [(case, mode) for case in CASES for mode in case["expected"] if mode != "keep"]
M2PO = [case for case in CASES if case["name"] == "m2po"]


@pytest.mark.parametrize(("case", "mode"), BY_LOSS, ids=[f"{case['name']}, {mode}" for case, mode in BY_LOSS])
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


@pytest.mark.parametrize("step", [1, -1])
def test_a_token_without_finite_logprobs_is_in_no_second_moment(step):
    config, old = CorrectionConfig(rollout_is=None, m2_threshold=0.04), [0.0, 0.1, torch.nan][::step]
    result = correct(rows([old]), rows([[0.3, 0.1, 0.0][::step]]), torch.ones(1, 3), config)
    # With the token that is not finite as a zero the mean would be 0.03.
    assert result.mask.tolist() == [[False, True, False]]


def test_a_rows_mean_is_over_its_own_tokens_that_count():
    layout, values = Layout.of_lengths([2, 1, 3]), torch.tensor([1.0, 3.0, 5.0, 7.0, math.nan, 8.0])
    where = torch.tensor([True, False, True, False, False, False])
    assert layout.mean_where(values, where).tolist() == [1.0, 5.0, 0.0]
    where = torch.tensor([True, True, False, True, False, True])
    assert layout.mean_where(values, where).tolist() == [2.0, 0.0, 7.5]


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
    # A mini-batch may hold less than one prompt: what is left of it is the whole mean.
    part = Correction(None, mask[:2] * torch.tensor([[0], [1]]))
    loss, _ = policy_loss("reinforce", logprobs[:2], logprobs[:2], ones[:2], mask[:2], config, part)
    assert float(loss) == pytest.approx((2 + 3 + 4) / 3)


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "prompt-mean"])
@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.125, 0.125]], ids=["whole", "part"])
def test_a_mini_batch_of_a_part_of_a_prompt_has_the_mean_of_that_part(mode, shares):
    layout, keep = Layout.of_lengths([2, 2], shares=shares), torch.ones(4, dtype=torch.bool)
    denominators = Denominators(4.0, layout.samples, 2.0)
    loss = aggregate_tokens(torch.arange(4.0), keep, layout, mode, denominators, layout.lengths)
    assert float(loss) == pytest.approx(1.5)
