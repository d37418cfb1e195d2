"""The loss of one optimizer step beside the policy loss: reference KL, entropy, filter, proximal policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from common.config import AlgorithmConfig
from learner.losses import LOSSES, Denominators
from learner.stats import Stats
from learner.step_loss import (
    PolicyOutput,
    Precomputed,
    StepLoss,
    TrainPosition,
    interpolated_logprobs,
    reference_kl,
    step_loss,
    sure_negatives,
)
from tests.support.golden import LOSSES_FILE
from tests.support.learner import tokens_of_rows

KL = LOSSES_FILE["kl"]


# Value and derivative of each estimator, of d = log pi_theta - log pi_ref.
ESTIMATORS: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "k1": (lambda d: d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    "low_var_kl": (lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    "abs": (abs, lambda d: float((d > 0) - (d < 0))),
    "k1+": (lambda d: d, lambda d: d),
    "k3+": (lambda d: math.exp(-d) - 1 + d, lambda d: d),
}


def kl_of(gaps: list[float], estimator: str) -> tuple[list[float], list[float]]:
    """The penalty of these gaps, and its gradient."""
    leaf = torch.tensor(gaps, dtype=torch.float64, requires_grad=True)
    reference = torch.linspace(-3, -1, len(gaps), dtype=torch.float64)
    penalty = reference_kl(reference + leaf, reference, estimator)
    penalty.sum().backward()
    return penalty.tolist(), leaf.grad.tolist()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_reference_kl_has_the_value_and_gradient_of_its_formula(estimator):
    value, slope = ESTIMATORS[estimator]
    gaps = [-1.7, -0.3, 0.0, 1e-4, 0.2, 2.4]
    penalty, gradient = kl_of(gaps, estimator)
    assert penalty == pytest.approx([value(d) for d in gaps], rel=1e-9, abs=1e-15)
    assert gradient == pytest.approx([slope(d) for d in gaps], rel=1e-9, abs=1e-12)
    far = kl_of([-1e4, -40.0, 40.0, 1e4], estimator)
    assert all(math.isfinite(number) for numbers in far for number in numbers)


def test_k1_and_k2_are_not_bounded():
    """verl and SkyRL bound k3 alone."""
    assert kl_of([30.0, -30.0], "k2") == ([450.0, 450.0], [30.0, -30.0])
    assert kl_of([30.0, -30.0], "k1") == ([30.0, -30.0], [1.0, 1.0])


@pytest.mark.parametrize("estimator", KL["expected"])
def test_the_reference_kl_is_golden(estimator):
    leaf = torch.tensor(KL["logprobs"], dtype=torch.float64, requires_grad=True)
    penalty = reference_kl(leaf, torch.tensor(KL["reference"], dtype=torch.float64), estimator)
    penalty.sum().backward()
    assert penalty.tolist() == pytest.approx(KL["expected"][estimator]["value"], rel=1e-12, abs=1e-15)
    assert leaf.grad.tolist() == pytest.approx(KL["expected"][estimator]["grad"], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("estimator", ["k3", "low_var_kl"])
def test_k3_is_bounded_as_verls(estimator):
    penalty, gradient = kl_of([-1.0, -3.0, 9.0, 20.0], estimator)
    assert penalty == pytest.approx([math.e - 2, 10.0, math.exp(-9) + 8, 10.0])
    assert [slope != 0 for slope in gradient] == [True, False, True, False]


def test_sure_tokens_of_negative_samples_are_left_out():
    old = torch.tensor([0.95, 0.5, 0.95, 0.5, 0.95, 0.9]).log()
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, 0.0, -1.0])
    assert sure_negatives(old, advantages, 0.9).tolist() == [True, False, False, False, False, False]
    assert not sure_negatives(torch.zeros(2), torch.full((2,), -1.0), 1.0).any(), "a bound of one leaves out none"


@pytest.mark.parametrize(
    ("mini_batch", "ages", "expected"),
    [(0, [0, 1, 2, 7], [0, 1, 1, 1]), (1, [0, 1, 2, 7], [0, 1 / 1.5, 2 / 2.5, 7 / 7.5]), (1, [-2] * 4, [0] * 4)],
)
def test_interpolation_nears_the_current_policy_with_age(mini_batch, ages, expected):
    torch.manual_seed(1)
    logprobs, rollout = torch.randn(2, 4, dtype=torch.float64)
    logprobs.requires_grad_()
    micro = tokens_of_rows([4], rollout, torch.zeros(4), 9 - torch.tensor(ages))
    interpolated = interpolated_logprobs(micro, logprobs, TrainPosition(9, mini_batch, 2, Denominators(1, 1, 1)))
    assert not interpolated.requires_grad
    shares = (interpolated - rollout) / (logprobs.detach() - rollout)
    assert shares.tolist() == pytest.approx(expected)


def one_step(precomputed: Precomputed | None = None, **fields: Any) -> tuple[StepLoss, torch.Tensor, dict[str, float]]:
    """The loss of two rows, its gradient and metrics; x = 0.1 everywhere but 3 in the last token."""
    leaf = torch.tensor([-1.0, -2.0, -0.05, -1.0, -3.0], dtype=torch.float64, requires_grad=True)
    rollout = leaf.detach() - torch.tensor([0.1, 0.1, 0.1, 0.1, 3.0])
    micro = tokens_of_rows([2, 3], rollout, torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64))
    entropies = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    config = AlgorithmConfig(**{"correction": {"preset": "decoupled_token_is"}, **fields})
    position, stats = TrainPosition(3, 0, 1, Denominators(5.0, 2.0, 10.0)), Stats()
    policy = PolicyOutput(leaf, entropies)
    step = step_loss(micro, policy, precomputed or Precomputed(), position, LOSSES[config.loss], config, stats)
    step.loss.backward()
    return step, leaf.grad, stats.reduce() | stats.reduce(names=["learned_tokens"])


@pytest.mark.parametrize("rejected", [0, 2, 4], ids=["none", "half a row", "a row"])
def test_seq_aggregations_weigh_a_sample_once(rejected):
    """The loss of a token is its place, from 1; a sample has the rows [1, 2] and [3, 4, 5, 6], another [7, 8, 9]."""
    logprobs = -torch.arange(1.0, 10.0, dtype=torch.float64)
    far = torch.tensor([0.0] * 2 + [40.0] * rejected + [0.0] * (7 - rejected), dtype=torch.float64)
    micro = tokens_of_rows([2, 4, 3], logprobs - far, torch.ones_like(logprobs), shares=[2 / 6, 4 / 6, 1.0])
    before = Denominators(tokens=9.0, samples=micro.layout.samples, horizon=10.0)
    # The mean of the second row's tokens, the sum over all tokens, and the samples and tokens left.
    second, total, samples, tokens = {
        0: (4.5, 45, 2, 9), 2: (5.5, 38, 2, 7), 4: (0.0, 27, 1 + 2 / 6, 5)
    }[rejected]  # fmt: skip
    by_mode = {
        "token-mean": total / tokens,
        "seq-mean-token-sum": total / samples,
        "seq-mean-token-mean": (2 / 6 * 1.5 + 4 / 6 * second + 8) / samples,
        "seq-mean-token-sum-norm": total / samples / 10,
    }
    for mode, expected in by_mode.items():
        correction = {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "1e-8_1e8"}
        config, stats = AlgorithmConfig(loss="reinforce", aggregation=mode, correction=correction), Stats()
        policy = PolicyOutput(logprobs.clone().requires_grad_(), torch.zeros_like(logprobs))
        loss = step_loss(
            micro, policy, Precomputed(), TrainPosition(1, 0, 1, before), LOSSES["reinforce"], config, stats
        )
        left = stats.reduce(names=("learned_tokens", "learned_samples"))
        factor = before.rescale(left["learned_tokens"], left["learned_samples"], mode)
        assert loss.loss.item() * factor == pytest.approx(expected), mode


REFERENCE = torch.full((5,), -2.0, dtype=torch.float64)
REJECTING = {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}  # the last token


def test_entropy_and_kl_are_means_over_the_tokens_that_are_left():
    plain, _, metrics = one_step(correction=REJECTING)
    penalties = {"entropy_coef": 0.1, "kl_coef": 0.5, "kl_estimator": "k1"}
    step, _, _ = one_step(Precomputed(reference=REFERENCE), correction=REJECTING, **penalties)
    assert metrics["learned_tokens"] == 4
    # The counts are those before rejection.
    entropy, kl = (1 + 2 + 3 + 4) / 5, (1.0 + 0.0 + 1.95 + 1.0) / 5
    assert step.parts.tolist() == pytest.approx([plain.loss.item(), kl, entropy, 0.0])
    assert step.loss.item() == pytest.approx(plain.loss.item() + 0.5 * kl - 0.1 * entropy)


def test_the_reference_kl_moves_the_gradient_by_its_own():
    _, plain, _ = one_step()
    _, gradient, _ = one_step(Precomputed(reference=REFERENCE), kl_coef=0.5, kl_estimator="k2")
    moved = torch.tensor([1.0, 0.0, 1.95, 1.0, -1.0], dtype=torch.float64) * 0.5 / 5
    torch.testing.assert_close(gradient - plain, moved)


def test_nan_of_a_rejected_token_reaches_neither_penalty():
    reference = torch.tensor([-2.0, -2.0, -2.0, -2.0, torch.nan], dtype=torch.float64)
    step, gradient, _ = one_step(Precomputed(reference=reference), correction=REJECTING, kl_coef=0.5, entropy_coef=0.1)
    assert bool(step.parts.isfinite().all())
    assert bool(gradient.isfinite().all())
    assert gradient[4] == 0


def test_sure_negative_tokens_leave_the_loss_and_are_counted():
    _, gradient, metrics = one_step(negative_max_prob=0.9)
    assert (gradient != 0).tolist() == [True, True, False, True, True]
    assert metrics["actor/negative_filtered"] == pytest.approx(1 / 5)
    assert metrics["learned_tokens"] == 4


def test_weights_are_constants_of_the_loss_in_bypass_mode_too():
    """REINFORCE's gradient is the weight itself, not the weight's derivative times log pi."""
    correction = {"rollout_is": "token", "rollout_is_threshold": 2.0}
    _, gradient, _ = one_step(correction=correction, proximal="rollout", loss="reinforce")
    weight = math.exp(0.1)
    assert gradient.tolist() == pytest.approx([-weight / 5] * 2 + [weight / 5] * 2 + [2 / 5], rel=1e-6)


def test_comparing_only_reports_the_error_of_interpolation():
    old = torch.tensor([-1.1, -2.0, -0.05, -1.0, -3.0], dtype=torch.float64)
    _, gradient, expected = one_step(Precomputed(old=old), proximal="recompute")
    _, same, metrics = one_step(Precomputed(old=old), proximal="compare")
    assert torch.equal(gradient, same)
    compared = {name: metrics.pop(f"proximal/{name}") for name in ("error", "bias", "moved", "away")}
    assert metrics == expected
    # All tokens are three versions old and no step was taken: the interpolation is the current policy.
    assert compared["error"] == compared["moved"] == compared["bias"] == pytest.approx(0.1 / 5)
    assert compared["away"] == pytest.approx((0.1 * 3 + 3.0) / 5, rel=1e-6)
