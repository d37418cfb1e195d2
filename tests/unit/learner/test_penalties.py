"""What is added to the policy loss or taken out of it, and the proximal policy between two others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
from tests.support.learner import tokens_of_rows

steady = settings(derandomize=True, deadline=None, max_examples=60, database=None)

# Value and derivative of each estimator, of d = log pi_theta - log pi_ref.
ESTIMATORS: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "k1": (lambda d: d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    # Held within 10, as verl and SkyRL hold it; none of the gaps below reaches that.
    "k3": (lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    "low_var_kl": (lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
}


def gap(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_reference_kl_has_the_value_and_gradient_of_its_formula(estimator):
    value, slope = ESTIMATORS[estimator]
    gaps = [-1.7, -0.3, 0.0, 1e-4, 0.2, 2.4]
    leaf = gap(*gaps)
    reference = torch.linspace(-3, -1, len(gaps), dtype=torch.float64)
    penalty = reference_kl(reference + leaf, reference, estimator)
    penalty.sum().backward()
    assert penalty.tolist() == pytest.approx([value(d) for d in gaps], rel=1e-9, abs=1e-15)
    assert leaf.grad.tolist() == pytest.approx([slope(d) for d in gaps], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k3", "low_var_kl"])
def test_k3_is_bounded_as_verls_and_beyond_the_bound_has_no_gradient(estimator):
    leaf = gap(-1.0, -3.0, 9.0, 20.0)
    penalty = reference_kl(leaf, torch.zeros_like(leaf), estimator)
    penalty.sum().backward()
    assert penalty.tolist() == pytest.approx([math.e - 2, 10.0, math.exp(-9) + 8, 10.0])
    assert (leaf.grad != 0).tolist() == [True, False, True, False]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_reference_kl_of_policies_far_apart_is_finite(estimator):
    leaf = gap(-1e4, -40.0, 40.0, 1e4)
    penalty = reference_kl(leaf, torch.zeros_like(leaf), estimator)
    penalty.sum().backward()
    assert bool(penalty.isfinite().all())
    assert bool(leaf.grad.isfinite().all())


def test_k2_has_the_gradient_of_the_kl_itself_and_k1_none_on_average():
    """Summed over all words with their probabilities, by which the estimators are sampled."""
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(7, dtype=torch.float64).log_softmax(0)

    def gradient(of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.autograd.grad(of(logits.log_softmax(0)), logits)[0]

    def mean(estimator: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda log_p: (log_p.exp().detach() * reference_kl(log_p, reference, estimator)).sum()

    true = gradient(lambda log_p: (log_p.exp() * (log_p - reference)).sum())
    torch.testing.assert_close(gradient(mean("k2")), true)
    torch.testing.assert_close(gradient(mean("k1")), torch.zeros_like(true))


def test_an_unknown_estimator_is_refused_with_what_is_allowed():
    with pytest.raises(ValueError, match="'k4' is unknown; allowed: k1, k2, k3, low_var_kl"):
        reference_kl(torch.zeros(1), torch.zeros(1), "k4")


def test_sure_tokens_of_negative_samples_are_left_out_and_no_others():
    old = torch.tensor([0.95, 0.5, 0.95, 0.5, 0.95, 0.9]).log()
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, 0.0, -1.0])
    assert sure_negatives(old, advantages, 0.9).tolist() == [True, False, False, False, False, False]
    assert not sure_negatives(torch.zeros(2), torch.full((2,), -1.0), 1.0).any(), "a bound of one leaves out none"


AGES = torch.tensor([0, 1, 2, 7])


def interpolate(
    logprobs: torch.Tensor, rollout: torch.Tensor, versions: torch.Tensor, version: int, progress: float
) -> torch.Tensor:
    """log pi_old after this share of the optimizer steps of a batch that began with `version`."""
    micro = tokens_of_rows([len(rollout)], rollout, torch.zeros_like(rollout), versions)
    steps = 10**9
    position = TrainPosition(version, round(progress * steps), steps, Denominators(1.0, 1.0, 1.0))
    return interpolated_logprobs(micro, logprobs, position)


def between(share: float, versions: torch.Tensor = 9 - AGES) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log pi_theta, log pi_rollout and the policy between, of a batch that began with version 9."""
    torch.manual_seed(1)
    logprobs = torch.randn(4, dtype=torch.float64, requires_grad=True)
    rollout = torch.randn(4, dtype=torch.float64)
    return logprobs, rollout, interpolate(logprobs, rollout, versions, 9, share)


def test_between_steps_it_is_between_the_two_the_nearer_to_the_current_the_older_the_token():
    for share, expected in ((0.0, [0, 1, 1, 1]), (0.5, [0, 1 / 1.5, 2 / 2.5, 7 / 7.5])):
        logprobs, rollout, interpolated = between(share)
        assert not interpolated.requires_grad
        assert interpolated[0] == rollout[0], "a fresh token keeps the policy that generated it"
        shares = ((interpolated - rollout) / (logprobs - rollout)).detach()
        assert shares.tolist() == pytest.approx(expected)
    _, rollout, interpolated = between(0.5, torch.full((4,), 11))
    assert torch.equal(interpolated, rollout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.9])
def test_it_is_exact_where_logprobs_move_linearly_with_the_version(share, dtype):
    torch.manual_seed(2)
    start, speed, versions = torch.randn(6, dtype=dtype) - 3, torch.randn(6, dtype=dtype) / 10, torch.arange(3, 9)

    def at(version: torch.Tensor | float) -> torch.Tensor:
        return start + speed * version

    interpolated = interpolate(at(9 + share), at(versions), versions, 9, share)
    torch.testing.assert_close(interpolated, at(9.0))


@steady
@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.integers(0, 50))
def test_it_never_leaves_the_stretch_between_the_two_policies(seed, share, proximal):
    generator = torch.Generator().manual_seed(seed)
    logprobs, rollout = 10 * torch.randn(2, 20, generator=generator, dtype=torch.float64)
    versions = torch.randint(max(0, proximal - 6), proximal + 2, (20,), generator=generator)
    interpolated = interpolate(logprobs, rollout, versions, proximal, share)
    slack = 1e-12
    assert bool((interpolated >= torch.minimum(logprobs, rollout) - slack).all())
    assert bool((interpolated <= torch.maximum(logprobs, rollout) + slack).all())


LENGTHS = [2, 3]


def one_step(precomputed: Precomputed | None = None, **fields: Any) -> tuple[StepLoss, torch.Tensor, dict[str, float]]:
    """The loss of two rows, its gradient and metrics; x = 0.1 everywhere but 3 in the last token."""
    leaf = torch.tensor([-1.0, -2.0, -0.05, -1.0, -3.0], dtype=torch.float64, requires_grad=True)
    rollout = leaf.detach() - torch.tensor([0.1, 0.1, 0.1, 0.1, 3.0])
    micro = tokens_of_rows(LENGTHS, rollout, torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64))
    entropies = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    config = AlgorithmConfig(**{"correction": {"preset": "decoupled_token_is"}, **fields})
    position, stats = TrainPosition(3, 0, 1, Denominators(5.0, 2.0, 10.0)), Stats()
    policy = PolicyOutput(leaf, entropies)
    step = step_loss(micro, policy, precomputed or Precomputed(), position, LOSSES[config.loss], config, stats)
    step.loss.backward()
    return step, leaf.grad, stats.reduce() | stats.reduce(names=["learned_tokens"])


def test_entropy_and_kl_are_means_over_the_tokens_that_are_left():
    reference = torch.full((5,), -2.0, dtype=torch.float64)
    rejecting = {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}
    plain, _, metrics = one_step(correction=rejecting)
    step, _, _ = one_step(
        Precomputed(reference=reference), correction=rejecting, entropy_coef=0.1, kl_coef=0.5, kl_estimator="k1"
    )
    # The last token is rejected; the counts are those before rejection.
    assert metrics["learned_tokens"] == 4
    entropy, kl = (1 + 2 + 3 + 4) / 5, (1.0 + 0.0 + 1.95 + 1.0) / 5
    assert step.parts.tolist() == pytest.approx([plain.loss.item(), kl, entropy])
    assert step.loss.item() == pytest.approx(plain.loss.item() + 0.5 * kl - 0.1 * entropy)


def test_the_reference_kl_moves_the_gradient_by_its_own():
    reference = torch.full((5,), -2.0, dtype=torch.float64)
    _, plain, _ = one_step()
    _, gradient, _ = one_step(Precomputed(reference=reference), kl_coef=0.5, kl_estimator="k2")
    moved = torch.tensor([1.0, 0.0, 1.95, 1.0, -1.0], dtype=torch.float64) * 0.5 / 5
    torch.testing.assert_close(gradient - plain, moved)


def test_nan_of_a_rejected_token_reaches_neither_penalty():
    rejecting = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}
    reference = torch.tensor([-2.0, -2.0, -2.0, -2.0, torch.nan], dtype=torch.float64)
    step, gradient, _ = one_step(Precomputed(reference=reference), correction=rejecting, kl_coef=0.5, entropy_coef=0.1)
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
    correction = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 2.0}
    _, gradient, _ = one_step(correction=correction)
    weight = math.exp(0.1)
    assert gradient.tolist() == pytest.approx([-weight / 5] * 2 + [weight / 5] * 2 + [2 / 5], rel=1e-6)


def test_comparing_reports_the_error_of_interpolation_and_changes_nothing_else():
    old = torch.tensor([-1.1, -2.0, -0.05, -1.0, -3.0], dtype=torch.float64)
    _, gradient, expected = one_step(Precomputed(old=old), proximal="recompute")
    _, same, metrics = one_step(Precomputed(old=old), proximal="compare")
    assert torch.equal(gradient, same)
    compared = {name: metrics.pop(f"proximal/{name}") for name in ("error", "bias", "moved", "away")}
    assert metrics == expected
    # All tokens are three versions old and no step was taken: the interpolation is the current policy.
    assert compared["error"] == compared["moved"] == compared["bias"] == pytest.approx(0.1 / 5)
    assert compared["away"] == pytest.approx((0.1 * 3 + 3.0) / 5, rel=1e-6)
