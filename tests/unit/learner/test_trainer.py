"""A training step by plain gradient descent, whatever device, ranks and rejection; and the statistics it declares."""

from __future__ import annotations

import math
import statistics
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.payload import Payload
from learner.batch.plan import plan_micro_batches
from learner.losses import PolicyTokens, TokenLoss, TokenLosses, load_loss
from learner.peak import peak_of
from learner.policy.model import Policy, load_policy
from learner.policy.operations import TRAINING, operations_of
from learner.ranks.world import World
from learner.reference import score
from learner.stats import Phases, Stats
from learner.trainer import Trainer
from tests.support import other_device
from tests.support.families import save_tiny
from tests.support.learner import ALONE, KEEPS_ALL, learner_config, make_samples, policy_of, with_scores

Samples = tuple[list[Payload], list[float]]
# Rejects rows whose tokens the generating policy found next to impossible, and no others.
REJECTING = {"correction": {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "1e-8_1e8"}}


class DescentEngine:
    """What `Trainer` needs of DeepSpeed's engine, with plain gradient descent."""

    def __init__(self, policy: Policy) -> None:
        self.module = policy
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}], clip_grad=0.0)
        self.gradient_factor = SimpleNamespace(value=1.0)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)

    def set_gradient_accumulation_boundary(self, is_last: bool) -> None:
        pass

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.add_(parameter.grad, alpha=-1e-2 * self.gradient_factor.value)
                parameter.grad = None

    def zero_grad(self) -> None:
        self.module.zero_grad()

    def get_global_grad_norm(self) -> float:
        return 0.0

    def zero_optimization_stage(self) -> int:
        return 2


class Twins(World):
    """The first of two ranks that have the same samples, so that their gradients' mean is its own."""

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        return [2 * value for value in values]

    def all_reduce_max(self, values: list[float]) -> list[float]:
        return values

    def gather(self, data: bytes) -> list[bytes]:
        return [data, data]


def trained(
    model: str,
    algorithm: dict[str, Any],
    world: World,
    samples: Samples,
    mini_batches: int = 1,
    zero_stage: int = 2,
    loss: TokenLoss | None = None,
    teacher: dict[str, Any] | None = None,
    budget: int = 96,
    share_prefixes: bool = False,
    peak: float = 0.0,
    phases: Phases | None = None,
    learner: dict[str, Any] | None = None,
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics of one batch of several micro-batches, and the weights after it; `teacher` is its section."""
    settings: dict[str, Any] = {"teacher": teacher or {}}
    settings |= {"dtype": "float32", "zero_stage": zero_stage, "mini_batches": mini_batches, "token_budget": budget}
    settings |= learner or {}
    algorithm = KEEPS_ALL | algorithm
    config = learner_config(model, "runs", algorithm=algorithm, sampler={"drift": {"mode": "ledger"}}, **settings)
    policy, (payloads, advantages) = load_policy(config), samples
    places = plan_micro_batches([[len(one.token_ids)] for one in payloads], mini_batches, 1, budget).of_rank(0)
    with nullcontext() if world.device == ALONE.device else other_device.other_device():
        if world.device != ALONE.device:
            other_device.move(policy)
        held: dict[int, Any] = dict(enumerate(payloads))
        trainer = Trainer.__new__(Trainer)
        trainer.config, trainer.world, trainer.engine = config, world, DescentEngine(policy)
        trainer.teacher, trainer.peak = config.teacher if config.teacher.is_set else None, peak
        rewards = [0.5] * len(payloads)
        packer = replace(trainer.packer(), share_prefixes=share_prefixes)
        batch = packer.rollout_batch(4, places, held, advantages, rewards)
        trainer.token_loss = loss or load_loss(config.algorithm)
        trainer.reference = partial(score, policy) if config.algorithm.kl_coef else None
        trainer.before_update, trainer.log = lambda: None, SimpleNamespace(warning=lambda *_, **__: None)
        metrics = trainer.train(batch, phases)
    del metrics["tokens/per_second"]
    return metrics, dict(policy.named_weights())


def test_sharing_prefixes_changes_nothing_but_the_tokens_computed(model, samples):
    """Rows share tokens that are the prompt's in some, and the model's in others."""
    payloads, advantages = samples
    ids = [payload.token_ids for payload in payloads]
    alike = [
        np.concatenate([ids[0][:shared], own[shared:]]) for own, shared in zip(ids, (0, 30, 30, 9, 20), strict=False)
    ]
    given = [replace(payload, token_ids=own) for payload, own in zip(payloads, alike, strict=False)], advantages[:5]
    (metrics, weights), (metrics_of_tree, weights_of_tree) = (
        trained(model, {"kl_coef": 0.1}, ALONE, given, budget=400, share_prefixes=share) for share in (False, True)
    )
    assert metrics.pop("tokens/shared") == 0
    assert metrics_of_tree.pop("tokens/shared") > 30
    assert metrics_of_tree == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(weights_of_tree, weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [ALONE, Twins(0, 2, ALONE.device)], ids=["one rank", "two ranks"])
def test_mfu_is_what_training_needs_of_all_that_the_gpus_could_compute(model, samples, world):
    phases, peak = Phases(), 1e12
    metrics, _ = trained(model, {}, world, samples, peak=peak, phases=phases)
    config = policy_of(model).model.config
    needed = TRAINING * sum(operations_of(config).of(len(payload.token_ids)) for payload in samples[0])
    assert metrics["gpu/mfu"] == pytest.approx(world.size * needed / (peak * phases.seconds["train"]))


@pytest.mark.parametrize(
    ("card", "teraflops"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H20", 148), ("NVIDIA H200", 989),
     ("NVIDIA L40S", 362), ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 0), ("GPU", 0)],
)  # fmt: skip
def test_the_peak_is_the_cards_own(card: str, teraflops: int) -> None:
    assert peak_of(card) == teraflops * 1e12


@pytest.fixture(scope="module")
def samples() -> Samples:
    return make_samples(8, seed=1, version=3)


SECOND_MOMENT = {"correction": {"m2_threshold": 0.1}}
ELSEWHERE: dict[str, dict[str, Any]] = {
    "penalties": {"proximal": "compare", "kl_coef": 0.1, "entropy_coef": 0.01, "negative_max_prob": 0.9},
    "gspo": {"proximal": "interpolate", "loss": "gspo", "aggregation": "seq-mean-token-mean"},
    "all compared": {"loss": "kl_cov", "loss_options": {"ratio": 0.3}, "proximal": "rollout", **SECOND_MOMENT},
    "taught": {},
}


@pytest.mark.parametrize("kind", ELSEWHERE)
@pytest.mark.integration
def test_a_batch_trained_on_another_device_has_the_same_metrics(model, samples, kind):
    """No tensor of the batch may stay behind on the CPU."""
    teacher = {"model": "t", "form": "loss", "top_k": 4, "decay_steps": 8} if kind == "taught" else None
    payloads, advantages = samples
    if teacher:
        payloads = [with_scores(one, 4) if i % 2 else one for i, one in enumerate(payloads)]
    there, here = (
        trained(model, ELSEWHERE[kind], world, (payloads, advantages), mini_batches=2, teacher=teacher)[0]
        for world in (World(0, 1, other_device.DEVICE), ALONE)
    )
    assert there == pytest.approx(here, rel=1e-4, abs=1e-5)
    if teacher:
        assert here["teacher/weight"] == 0.5
        assert 0 < here["teacher/tokens"] < 1


def test_a_teacher_teaches_where_all_advantages_are_nothing(model, samples):
    payloads, _ = samples
    idle, before = trained(model, {}, ALONE, (payloads, [0.0] * len(payloads)))
    taught = [with_scores(one, 0) for one in payloads], [0.0] * len(payloads)
    metrics, after = trained(model, {}, ALONE, taught, teacher={"model": "t"})
    assert (metrics["actor/skipped_steps"], idle["actor/skipped_steps"]) == (0, 0)
    assert metrics["actor/pg_loss"] != 0 == idle["actor/pg_loss"]
    assert any(not torch.equal(before[name], after[name]) for name in before)


def assert_same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-5) -> None:
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_neither_more_ranks_nor_rejected_samples_change_the_step(model, samples, aggregation):
    algorithm = {**REJECTING, "aggregation": aggregation}
    _, expected = trained(model, algorithm, ALONE, samples)
    start = dict(policy_of(model).named_weights())
    assert all((weight - start[name]).abs().max() > 1e-4 for name, weight in expected.items())
    _, weights = trained(model, algorithm, Twins(0, 2, ALONE.device), samples)
    assert_same(weights, expected)
    far = [replace(payload, logprobs=payload.logprobs - np.float32(40)) for payload in samples[0][:5]]
    metrics, weights = trained(model, algorithm, ALONE, (far + samples[0], [1.0] * 5 + samples[1]))
    assert metrics["rollout_corr/seq_masked_fraction"] == pytest.approx(5 / 13)
    assert_same(weights, expected)


def comparing(name: str, samples: Samples) -> dict[str, Any]:
    """What compares all tokens of a mini-batch, and changes a third of them, so that it matters which."""
    tokens = sum(len(payload.logprobs) for payload in samples[0])
    ratio = (tokens // 3 + 0.25) / tokens  # a third of them, and of twice as many twice as many
    return {
        "kl_cov": {"loss": "kl_cov", "loss_options": {"ratio": ratio, "coef": 2.0}},
        "clip_cov": {"loss": "clip_cov", "loss_options": {"ratio": ratio, "cov_low": -9.0, "cov_high": 9.0}},
        "m2": SECOND_MOMENT,
        "m2 and kl_cov": {"loss": "kl_cov", "loss_options": {"ratio": 0.5}} | SECOND_MOMENT,
    }[name] | {"proximal": "rollout"}


@pytest.mark.parametrize("name", ["clip_cov", "m2", "m2 and kl_cov"])
def test_what_compares_all_tokens_is_the_same_however_packed(model, samples, name):
    algorithm = comparing(name, samples)
    metrics, expected = trained(model, algorithm, ALONE, samples, budget=10_000)
    packed, weights = trained(model, algorithm, ALONE, samples, budget=60)
    assert_same(weights, expected)
    del packed["actor/drift"], metrics["actor/drift"]  # of the first micro-batch
    assert packed == pytest.approx(metrics, rel=1e-3, abs=1e-4)
    counts = ("actor/cov_chosen", "rollout_corr/m2_masked_fraction")
    assert all(0.2 < metrics[count] < 0.8 for count in counts if count in metrics)


def test_a_loss_compares_tokens_by_what_the_teacher_adds(model, samples):
    taught = [with_scores(one, 0) for one in samples[0]], samples[1]
    algorithm, teacher = comparing("kl_cov", samples), {"model": "t", "weight": 5.0}
    _, expected = trained(model, algorithm, ALONE, taught, budget=10_000, teacher=teacher)
    _, weights = trained(model, algorithm, ALONE, taught, budget=60, teacher=teacher)
    assert_same(weights, expected)


@pytest.mark.parametrize("name", ["clip_cov", "m2"])
def test_what_compares_all_tokens_does_so_over_all_ranks(model, samples, name):
    algorithm = comparing(name, samples)
    _, expected = trained(model, algorithm, ALONE, samples)
    _, weights = trained(model, algorithm, Twins(0, 2, ALONE.device), samples)
    assert_same(weights, expected)


def test_later_mini_batches_clip_around_the_first_policy(model, samples):
    whole, halves = (trained(model, {"proximal": "recompute"}, ALONE, samples, minis)[0] for minis in (1, 2))
    assert whole["actor/ppo_kl"] == 0
    assert abs(halves["actor/ppo_kl"]) > 1e-6


@pytest.mark.parametrize(("scaling", "power"), [("none", 0), ("sqrt", 0.5)])
def test_learning_rate_scales_with_effective_sample_size(model, samples, scaling, power):
    metrics, _ = trained(model, {"ess_lr": scaling}, ALONE, samples)
    size = metrics["rollout_corr/eff_sample_size"]
    assert 0 < size < 0.99
    assert metrics["actor/lr"] == pytest.approx(1e-3 * size**power)


def steep(tokens: PolicyTokens, config: Any) -> TokenLosses:
    """Zero in the first step of a batch, where its slope is infinite."""
    return tokens.log_ratio.abs().sqrt(), {}


@pytest.mark.parametrize(("advantage", "loss"), [(np.inf, None), (0.5, steep)], ids=["loss", "gradient"])
def test_what_is_not_finite_never_reaches_the_weights(model, samples, advantage, loss):
    bad = samples[0], [*samples[1][:-1], advantage]
    metrics, weights = trained(model, {}, ALONE, bad, zero_stage=0, loss=loss)
    start = dict(policy_of(model).named_weights())
    assert all(torch.equal(weight, start[name]) for name, weight in weights.items())
    names = ("actor/skipped_steps", "actor/grad_norm", "actor/lr", "actor/loss", "actor/drift")
    assert [metrics[name] for name in names] == [1, 0, 0, 0, 0]


def test_a_step_without_a_kept_token_leaves_no_gradient_of_the_routers_balance(samples, tmp_path):
    save_tiny(tmp_path, "Qwen3-MoE")
    far = [replace(payload, logprobs=payload.logprobs - np.float32(40)) for payload in samples[0]]
    balanced = {"router_balance": 0.1}
    metrics, weights = trained(str(tmp_path), REJECTING, ALONE, (far, samples[1]), zero_stage=0, learner=balanced)
    start = dict(policy_of(tmp_path).named_weights())
    assert metrics["actor/skipped_steps"] == 1
    assert all(torch.equal(weight, start[name]) for name, weight in weights.items())
    assert not any(weight.grad is not None and weight.grad.any() for weight in weights.values())


def test_the_drift_is_that_of_tokens_with_finite_log_probs():
    trainer, before = Trainer.__new__(Trainer), torch.tensor([-1.0, np.nan, -3.0, -2.0])
    trainer.world = ALONE
    trainer._forward = lambda micro: SimpleNamespace(logprobs=torch.tensor([-1.5, np.nan, -3.0, -np.inf]))
    assert trainer._drift(None, before) == 0.25
    assert trainer._drift(None, before * np.nan) == 0


VALUES = [0.5, -1.0, 2.0, 7.0, 7.0]
AGES = [0, 1, 1, 4, 0]


def declared(values: list[float], ages: list[int]) -> Stats:
    stats, tensor = Stats(), torch.tensor(values, dtype=torch.float64)
    bucket = torch.tensor(ages, dtype=torch.int64)
    stats.total("tokens", torch.ones_like(tensor))
    stats.total("batch/sum", tensor)
    stats.mean("a/mean", tensor, over="tokens")
    stats.mean("a/centred", tensor, over="tokens", around=3.0)
    stats.mean("a/share", tensor > 1, over="tokens")
    stats.std("a/std", tensor, over="tokens", around=1.0)
    stats.std("a/sample_std", tensor, over="tokens", around=2.0, sample=True)
    stats.effective_sample_size("a/ess", tensor, over="tokens")
    stats.extremes({"a/max": tensor}, {"a/min": tensor})
    stats.extremes({"a/oldest": bucket}, {})
    stats.by_age(bucket, {"{age}/mean": tensor}, {"{age}/ess": tensor}, share="{age}/fraction", over="tokens")
    return stats


EXPECTED = {
    "batch/sum": 15.5, "a/mean": 3.1, "a/centred": 3.1, "a/share": 3 / 5, "a/max": 7.0, "a/min": -1.0, "a/oldest": 4,
    "a/std": statistics.pstdev(VALUES), "a/sample_std": statistics.stdev(VALUES),
    "a/ess": 15.5**2 / (5 * sum(value**2 for value in VALUES)),
    "age_0/mean": 3.75, "age_1/mean": 0.5, "age_5_plus/mean": 7.0,
    "age_0/ess": 7.5**2 / (2 * (0.5**2 + 7.0**2)), "age_1/ess": 1.0 / (2 * 5.0), "age_5_plus/ess": 1.0,
    "age_0/fraction": 2 / 5, "age_1/fraction": 2 / 5, "age_5_plus/fraction": 1 / 5,
}  # fmt: skip


@pytest.mark.parametrize("cut", range(len(VALUES) + 1))
def test_parts_have_the_values_of_the_formulas(cut):
    stats = declared(VALUES[:cut], AGES[:cut])
    stats.update(declared(VALUES[cut:], AGES[cut:]))
    assert stats.reduce() == pytest.approx(EXPECTED)
    # Totals without a slash are no metrics, but can be asked for.
    assert stats.reduce(names=["tokens", "a/max"]) == {"tokens": 5.0, "a/max": 7.0}


def test_means_over_nothing_are_zero_and_extremes_left_out():
    metrics = declared([], []).reduce()
    assert metrics["a/mean"] == metrics["a/std"] == metrics["a/ess"] == 0
    assert not {"a/max", "a/min", "a/oldest", "age_0/mean"} & metrics.keys()


def test_tiny_spreads_survive_and_nan_is_left_out():
    stats, values = Stats(), 1 + 1e-9 * torch.tensor([1.0, -1.0], dtype=torch.float64)
    stats.total("tokens", torch.ones(2))
    stats.std("a/std", values, over="tokens", around=1.0)
    stats.mean("a/mean", torch.tensor([math.nan]), over="tokens")
    assert stats.reduce() == {"a/std": pytest.approx(1e-9, rel=1e-6)}
