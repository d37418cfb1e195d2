"""The loss of one optimizer step: proximal policy, reference KL, entropy, filter, and what a teacher's scores add."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.config import AlgorithmConfig, TeacherConfig
from learner.batch.teacher import TeacherScores, coarse_kl, weight_at
from learner.batch.tensors import Packer
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
from tests.support.learner import VOCABULARY, joined, make_payload, tokens_of_rows, with_scores

KL = LOSSES_FILE["kl"]


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def kl_of(logprobs: list[float], estimator: str, reference: float = 0.0) -> tuple[list[float], ...]:
    """The penalty of log-probs, and its gradient."""
    leaf = doubles(*logprobs).requires_grad_()
    penalty = reference_kl(leaf, torch.full(leaf.shape, reference, dtype=leaf.dtype), estimator)
    penalty.sum().backward()
    return penalty.tolist(), leaf.grad.tolist()


@pytest.mark.parametrize("estimator", KL["expected"])
def test_the_reference_kl_is_golden(estimator):
    penalty, gradient = kl_of(KL["logprobs"], estimator, KL["reference"])
    assert penalty == pytest.approx(KL["expected"][estimator]["value"], rel=1e-12, abs=1e-15)
    assert gradient == pytest.approx(KL["expected"][estimator]["grad"], rel=1e-12, abs=1e-15)
    far = kl_of([-1e4, -40.0, 40.0, 1e4], estimator)
    assert all(math.isfinite(number) for numbers in far for number in numbers)


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


LOGPROBS = doubles(-1.0, -2.0, -0.05, -1.0, -3.0)
ADVANTAGES = doubles(1.0, 1.0, -1.0, -1.0, -1.0)


def one_step(
    precomputed: Precomputed | None = None,
    teacher: dict[str, Any] | None = None,
    scores: TeacherScores | None = None,
    version: int = 3,
    **algorithm: Any,
) -> tuple[StepLoss, torch.Tensor, dict[str, float]]:
    """The loss of two rows, its gradient and metrics; x = 0.1 everywhere but 3 in the last token."""
    leaf = LOGPROBS.clone().requires_grad_()
    micro = tokens_of_rows([2, 3], LOGPROBS - torch.tensor([0.1, 0.1, 0.1, 0.1, 3.0]), ADVANTAGES)
    likeliest = None
    if scores is not None and scores.ids is not None:
        likeliest = torch.stack([leaf, (1 - leaf.exp()).log() - 1], -1)
    policy = PolicyOutput(leaf, doubles(1.0, 2.0, 3.0, 4.0, 5.0), likeliest=likeliest)
    config = AlgorithmConfig(**{"correction": {"preset": "decoupled_token_is"}} | algorithm)
    position, stats = TrainPosition(version, 0, 1, Denominators(5.0, 2.0, 10.0)), Stats()
    step = step_loss(
        replace(micro, teacher=scores),
        policy,
        precomputed or Precomputed(),
        position,
        LOSSES[config.loss],
        config,
        stats,
        TeacherConfig(model="t", **teacher) if teacher is not None else None,
    )
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
    left_by_rejected = {0: (4.5, 45, 2, 9), 2: (5.5, 38, 2, 7), 4: (0.0, 27, 1 + 2 / 6, 5)}
    second, total, samples, tokens = left_by_rejected[rejected]
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
        position = TrainPosition(1, 0, 1, before)
        loss = step_loss(micro, policy, Precomputed(), position, LOSSES["reinforce"], config, stats).loss
        left = stats.reduce(names=("learned_tokens", "learned_samples"))
        factor = before.rescale(left["learned_tokens"], left["learned_samples"], mode)
        assert loss.item() * factor == pytest.approx(expected), mode


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
    torch.testing.assert_close(gradient - plain, doubles(1.0, 0.0, 1.95, 1.0, -1.0) * 0.5 / 5)


def test_nan_of_a_rejected_token_reaches_neither_penalty():
    reference = Precomputed(reference=doubles(-2.0, -2.0, -2.0, -2.0, torch.nan))
    step, gradient, _ = one_step(reference, correction=REJECTING, kl_coef=0.5, entropy_coef=0.1)
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
    old = Precomputed(old=doubles(-1.1, -2.0, -0.05, -1.0, -3.0))
    _, gradient, expected = one_step(old, proximal="recompute")
    _, same, metrics = one_step(old, proximal="compare")
    assert torch.equal(gradient, same)
    compared = {name: metrics.pop(f"proximal/{name}") for name in ("error", "bias", "moved", "away")}
    assert metrics == expected
    # All tokens are three versions old and no step was taken: the interpolation is the current policy.
    assert compared["error"] == compared["moved"] == compared["bias"] == pytest.approx(0.1 / 5)
    assert compared["away"] == pytest.approx((0.1 * 3 + 3.0) / 5, rel=1e-6)


PLAIN: dict[str, Any] = {"loss": "reinforce", "correction": {"preset": "disabled"}}


def whole_kl(policy: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return (policy.exp() * (policy - teacher)).sum(-1)


def merged(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of the tokens of these ids, and of all others together [N, K + 1]."""
    others = logprobs.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(1, ids), others], -1)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_coarse_kl_is_that_of_the_merged_outcomes(k):
    torch.manual_seed(0)
    policy, teacher = torch.randn(2, 6, 8, dtype=torch.float64).log_softmax(-1)  # of 6 places and 8 token ids
    ids = teacher.topk(k).indices
    logits = [policy.clone().requires_grad_() for _ in range(2)]
    kl = coarse_kl(logits[0].log_softmax(-1).gather(1, ids), teacher.gather(1, ids))
    expected = whole_kl(merged(logits[1].log_softmax(-1), ids), merged(teacher, ids))
    torch.testing.assert_close(kl, expected)
    for leaf, value in zip(logits, (kl, expected), strict=True):
        value.sum().backward()
        assert leaf.grad.abs().max() > 0
    torch.testing.assert_close(logits[0].grad, logits[1].grad)
    assert (kl <= whole_kl(policy, teacher) + 1e-9).all()
    chosen = policy.gather(1, ids).requires_grad_()
    assert torch.autograd.gradcheck(lambda values: coarse_kl(values, teacher.gather(1, ids)), chosen)


def test_certainty_leaves_value_and_gradient_finite():
    """Policy and teacher put everything on one token: on the same, on different ones, and among or beside the K."""
    certain, teacher = torch.zeros(2, 4, 5)
    certain[torch.arange(4), torch.tensor([0, 0, 4, 1])] = 1e3
    teacher[torch.arange(4), torch.tensor([0, 1, 0, 4])] = 1e3
    leaf, ids = certain.requires_grad_(), torch.tensor([[0, 1]] * 4)
    kl = coarse_kl(leaf.log_softmax(-1).gather(1, ids), teacher.log_softmax(-1).gather(1, ids))
    kl.sum().backward()
    assert kl.isfinite().all()
    assert leaf.grad.isfinite().all()
    assert kl[0].abs() < 1e-6
    assert (kl[1:] > 10).all()


def test_the_weight_falls_in_a_line_and_stays_at_nothing():
    decaying = TeacherConfig(weight=2.0, decay_steps=4)
    assert [weight_at(decaying, version) for version in (0, 1, 3, 4, 9)] == [2.0, 1.5, 0.5, 0.0, 0.0]
    assert weight_at(TeacherConfig(weight=2.0), 1000) == 2.0


FIRST_THREE = torch.tensor([True, True, True, False, False])
SCORES = TeacherScores(FIRST_THREE, doubles(-0.5, -2.5, -1.05, 0.0, 0.0))
GAPS = doubles(-0.5, 0.5, 1.0, 0.0, 0.0)  # log pi - log pi_T


@pytest.mark.parametrize("reward", [True, False])
def test_the_advantage_form_has_the_score_functions_gradient(reward):
    """Of A - w (log pi - log pi_T) at scored tokens, of A alone at the others."""
    _, gradient, metrics = one_step(teacher={"weight": 0.4, "reward": reward}, scores=SCORES, **PLAIN)
    kept = torch.tensor([float(reward)] * 3 + [1.0] * 2)
    torch.testing.assert_close(gradient, -(ADVANTAGES * kept - 0.4 * GAPS) / 5)
    assert metrics["teacher/kl"] == pytest.approx(1.0 / 3)
    assert metrics["teacher/advantage"] == pytest.approx(0.4 * 2.0 / 3)
    assert metrics["teacher/tokens"] == pytest.approx(3 / 5)
    assert metrics["teacher/logprob"] == pytest.approx(-4.05 / 3)
    assert metrics["teacher/policy_logprob"] == pytest.approx(-3.05 / 3)


def test_the_loss_form_adds_the_kls_own_gradient():
    _, plain, _ = one_step(**PLAIN)
    teacher = {"weight": 0.4, "decay_steps": 4, "form": "loss"}
    step, gradient, _ = one_step(teacher=teacher, scores=SCORES, version=1, **PLAIN)
    torch.testing.assert_close(gradient - plain, 0.3 * GAPS / 5)
    assert step.parts[3] == pytest.approx(0.3 * float(GAPS.square().sum()) / 2 / 5)


def test_the_likeliest_tokens_add_the_coarse_kl():
    ids = torch.zeros(5, 2, dtype=torch.int64)
    scores = TeacherScores(FIRST_THREE, torch.full((5, 2), -1.5, dtype=torch.float64), ids)
    plain, _, _ = one_step(**PLAIN)
    step, gradient, metrics = one_step(teacher={"weight": 0.4, "form": "loss", "top_k": 2}, scores=scores, **PLAIN)
    logprobs = LOGPROBS[:3]
    kl = coarse_kl(torch.stack([logprobs, (1 - logprobs.exp()).log() - 1], -1), scores.logprobs[:3])
    assert step.loss.item() - plain.loss.item() == pytest.approx(0.4 * kl.sum().item() / 5)
    assert metrics["teacher/kl"] == pytest.approx(kl.mean().item())
    assert metrics["teacher/mass"] == pytest.approx(2 * np.exp(-1.5))
    assert gradient.isfinite().all()


@pytest.mark.parametrize("form", ["advantage", "loss"])
def test_a_batch_without_scores_trains_as_without_a_teacher(form):
    step, gradient, expected = one_step(**PLAIN)
    same, same_gradient, metrics = one_step(teacher={"form": form, "reward": False}, **PLAIN)
    assert torch.equal(gradient, same_gradient)
    assert torch.equal(step.parts, same.parts)
    assert {name: value for name, value in metrics.items() if not name.startswith("teacher/")} == expected
    assert metrics["teacher/tokens"] == metrics["teacher/kl"] == 0


def test_sure_tokens_are_judged_by_the_combined_advantage():
    """The third token's reward is negative, and the teacher finds it likelier than the policy does."""
    praising = TeacherScores(FIRST_THREE, doubles(-1.0, -2.0, -0.01, 0.0, 0.0))
    for weight, trained in ((0.0, False), (100.0, True)):
        _, gradient, _ = one_step(teacher={"weight": weight}, scores=praising, negative_max_prob=0.9, **PLAIN)
        assert bool(gradient[2] != 0) == trained


def test_scores_are_packed_with_their_tokens():
    rng = np.random.default_rng(0)
    plain, first, second = (make_payload(rng, length) for length in (9, 12, 15))
    for k in (0, 3):
        taught = with_scores(joined([first, second]), k)
        packer = Packer(VOCABULARY, top_k=k)
        rows = [(row, 1.0) for row in (*taught.rows(), plain)]
        scores = packer.micro_batch([rows[0], (plain, 1.0), rows[1]]).teacher
        tokens = [len(first.logprobs), len(plain.logprobs), len(second.logprobs)]
        assert scores.scored.tolist() == [True] * tokens[0] + [False] * tokens[1] + [True] * tokens[2]
        packed = taught.teacher_logprobs if k else taught.teacher_logprobs[:, 0]
        assert torch.equal(scores.logprobs[scores.scored], torch.from_numpy(packed))
        assert not scores.logprobs[~scores.scored].any()
        if k:
            assert torch.equal(scores.ids[scores.scored], torch.from_numpy(taught.teacher_ids).long())
        assert Packer(VOCABULARY).micro_batch(rows).teacher is None, "without a teacher in the configuration"
        assert packer.micro_batch([(plain, 1.0)]).teacher is None
        assert packer.micro_batch([]).teacher is None
