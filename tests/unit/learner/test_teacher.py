"""A teacher's scores: the reverse KL, its gradient, and what they are to a micro-batch's advantages and loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.config import AlgorithmConfig, TeacherConfig
from learner.batch.teacher import TeacherScores, coarse_kl, weight_at
from learner.batch.tensors import Packer
from learner.losses import LOSSES, Denominators
from learner.stats import Stats
from learner.step_loss import PolicyOutput, Precomputed, StepLoss, TrainPosition, step_loss
from tests.support.learner import VOCABULARY, joined, make_payload, tokens_of_rows, with_scores

N, V = 6, 8
PLAIN = AlgorithmConfig(loss="reinforce", correction={"preset": "disabled"})


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the policy and of a teacher [N, V] each."""
    torch.manual_seed(0)
    policy, teacher = torch.randn(2, N, V, dtype=torch.float64).log_softmax(-1)
    return policy, teacher


def whole_kl(policy: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return (policy.exp() * (policy - teacher)).sum(-1)


def merged(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of the tokens of these ids, and of all others together [N, K + 1]."""
    others = logprobs.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(1, ids), others], -1)


@pytest.mark.parametrize("k", [1, 3, V - 1])
def test_the_coarse_kl_is_that_of_the_merged_outcomes(k):
    policy, teacher = distributions()
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


def test_the_coarse_kl_passes_gradcheck():
    policy, teacher = distributions()
    ids = teacher.topk(3).indices
    chosen = policy.gather(1, ids).requires_grad_()
    assert torch.autograd.gradcheck(lambda values: coarse_kl(values, teacher.gather(1, ids)), chosen)


def test_certainty_leaves_value_and_gradient_finite():
    """Policy and teacher put everything on one token: on the same, on different ones, and among or beside the K."""
    certain = torch.zeros(4, 5)
    certain[torch.arange(4), torch.tensor([0, 0, 4, 1])] = 1e3
    teacher = torch.zeros(4, 5)
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


def taught_step(
    teacher: TeacherConfig | None, scores: TeacherScores | None, algorithm: AlgorithmConfig = PLAIN, version: int = 0
) -> tuple[StepLoss, torch.Tensor, dict[str, float]]:
    """The loss of five tokens in two rows, its gradient by their log-probs, and metrics."""
    leaf = torch.tensor([-1.0, -2.0, -0.05, -1.0, -3.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    micro = replace(tokens_of_rows([2, 3], leaf.detach(), advantages), teacher=scores)
    likeliest = None
    if scores is not None and scores.ids is not None:
        likeliest = torch.stack([leaf, (1 - leaf.exp()).log() - 1], -1)
    policy, stats = PolicyOutput(leaf, torch.zeros_like(leaf), likeliest=likeliest), Stats()
    position = TrainPosition(version, 0, 1, Denominators(5.0, 2.0, 10.0))
    step = step_loss(micro, policy, Precomputed(), position, LOSSES[algorithm.loss], algorithm, stats, teacher)
    step.loss.backward()
    return step, leaf.grad, stats.reduce()


SAMPLED = torch.tensor([-0.5, -2.5, -1.05, 0.0, 0.0], dtype=torch.float64)
FIRST_THREE = torch.tensor([True, True, True, False, False])
SCORES = TeacherScores(FIRST_THREE, SAMPLED)
GAPS = torch.tensor([-0.5, 0.5, 1.0, 0.0, 0.0], dtype=torch.float64)  # log pi - log pi_T


@pytest.mark.parametrize("reward", [True, False])
def test_the_advantage_form_has_the_score_functions_gradient(reward):
    """Of A - w (log pi - log pi_T) at scored tokens, of A alone at the others."""
    _, gradient, metrics = taught_step(TeacherConfig(model="t", weight=0.4, reward=reward), SCORES)
    kept = torch.tensor([float(reward)] * 3 + [1.0] * 2)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]) * kept - 0.4 * GAPS
    torch.testing.assert_close(gradient, -advantages / 5)
    assert metrics["teacher/kl"] == pytest.approx(1.0 / 3)
    assert metrics["teacher/advantage"] == pytest.approx(0.4 * 2.0 / 3)
    assert metrics["teacher/tokens"] == pytest.approx(3 / 5)
    assert metrics["teacher/logprob"] == pytest.approx(-4.05 / 3)
    assert metrics["teacher/policy_logprob"] == pytest.approx(-3.05 / 3)


def test_the_loss_form_adds_the_kls_own_gradient():
    _, plain, _ = taught_step(None, None)
    step, gradient, _ = taught_step(TeacherConfig(model="t", weight=0.4, decay_steps=4, form="loss"), SCORES, version=1)
    torch.testing.assert_close(gradient - plain, 0.3 * GAPS / 5)
    assert step.parts[3] == pytest.approx(0.3 * float(GAPS.square().sum()) / 2 / 5)


def test_the_likeliest_tokens_add_the_coarse_kl():
    ids = torch.zeros(5, 2, dtype=torch.int64)
    scores = TeacherScores(FIRST_THREE, torch.full((5, 2), -1.5, dtype=torch.float64), ids)
    plain, _, _ = taught_step(None, None)
    step, gradient, metrics = taught_step(TeacherConfig(model="t", weight=0.4, form="loss", top_k=2), scores)
    logprobs = torch.tensor([-1.0, -2.0, -0.05], dtype=torch.float64)
    kl = coarse_kl(torch.stack([logprobs, (1 - logprobs.exp()).log() - 1], -1), scores.logprobs[:3])
    assert step.loss.item() - plain.loss.item() == pytest.approx(0.4 * kl.sum().item() / 5)
    assert metrics["teacher/kl"] == pytest.approx(kl.mean().item())
    assert metrics["teacher/mass"] == pytest.approx(2 * np.exp(-1.5))
    assert gradient.isfinite().all()


@pytest.mark.parametrize("form", ["advantage", "loss"])
def test_a_batch_without_scores_trains_as_without_a_teacher(form):
    step, gradient, expected = taught_step(None, None)
    same, same_gradient, metrics = taught_step(TeacherConfig(model="t", form=form, reward=False), None)
    assert torch.equal(gradient, same_gradient)
    assert torch.equal(step.parts, same.parts)
    assert {name: value for name, value in metrics.items() if not name.startswith("teacher/")} == expected
    assert metrics["teacher/tokens"] == metrics["teacher/kl"] == 0


def test_sure_tokens_are_judged_by_the_combined_advantage():
    """The third token's reward is negative, and the teacher finds it likelier than the policy does."""
    algorithm = PLAIN.model_copy(update={"negative_max_prob": 0.9})
    praising = TeacherScores(FIRST_THREE, torch.tensor([-1.0, -2.0, -0.01, 0.0, 0.0], dtype=torch.float64))
    gradients = [
        taught_step(TeacherConfig(model="t", weight=weight), praising, algorithm)[1] for weight in (0.0, 100.0)
    ]
    assert [float(gradient[2]) != 0 for gradient in gradients] == [False, True]


def test_scores_are_packed_with_their_tokens():
    rng = np.random.default_rng(0)
    plain, first, second = (make_payload(rng, length) for length in (9, 12, 15))
    for k in (0, 3):
        taught = with_scores(joined([first, second]), k)
        packer = Packer(VOCABULARY, top_k=k)
        rows = [(row, 1.0) for row in (*taught.rows(), plain)]
        micro = packer.micro_batch([rows[0], (plain, 1.0), rows[1]])
        scores, tokens = micro.teacher, [len(first.logprobs), len(plain.logprobs), len(second.logprobs)]
        assert scores.scored.tolist() == [True] * tokens[0] + [False] * tokens[1] + [True] * tokens[2]
        packed = taught.teacher_logprobs if k else taught.teacher_logprobs[:, 0]
        assert torch.equal(scores.logprobs[scores.scored], torch.from_numpy(packed))
        assert not scores.logprobs[~scores.scored].any()
        if k:
            assert torch.equal(scores.ids[scores.scored], torch.from_numpy(taught.teacher_ids).long())
        assert Packer(VOCABULARY).micro_batch(rows).teacher is None, "without a teacher in the configuration"
        assert packer.micro_batch([(plain, 1.0)]).teacher is None
        assert packer.micro_batch([]).teacher is None
