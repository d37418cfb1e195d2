"""A training step on a device that is not the processor: nothing of it may stay behind on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from learner.batch import RolloutBatch, plan_micro_batches, rollout_batch
from learner.losses import load_loss
from learner.model import Policy, load_policy
from learner.reference import _scorer
from learner.trainer import Trainer
from learner.world import World
from tests.support import other_device
from tests.support.learner import KEEPS_ALL, VOCABULARY, learner_config, make_samples

CPU = torch.device("cpu")


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
                parameter.add_(parameter.grad, alpha=-1e-2)
                parameter.grad = None

    def get_global_grad_norm(self) -> float:
        return 0.0

    def zero_optimization_stage(self) -> int:
        return 2


def metrics_of(model: str, folder: Path, device: torch.device, algorithm: dict[str, Any]) -> dict[str, float]:
    """Metrics of one batch of two mini-batches with several micro-batches each."""
    config = learner_config(
        model,
        folder,
        dtype="float32",
        zero_stage=2,
        mini_batches=2,
        token_budget=96,
        algorithm=KEEPS_ALL | algorithm,
        sampler={"drift": {"mode": "ledger"}},
    )
    policy = load_policy(config)
    with nullcontext() if device == CPU else other_device.other_device():
        if device != CPU:
            other_device.move(policy)
        trainer = Trainer.__new__(Trainer)
        trainer.config, trainer.world, trainer.engine = config, World(0, 1, device), DescentEngine(policy)
        trainer.token_loss = load_loss(config.algorithm)
        trainer.reference = _scorer(policy) if config.algorithm.kl_coef else None
        trainer.before_update, trainer.log = lambda: None, SimpleNamespace(warning=lambda *_, **__: None)
        metrics = trainer.train(samples_on(config, device))
    del metrics["tokens/per_second"]
    return metrics


def samples_on(config: Any, device: torch.device) -> RolloutBatch:
    payloads, advantages = make_samples(8, seed=1, version=3)
    lengths = [len(payload.token_ids) for payload in payloads]
    places = plan_micro_batches(lengths, config.learner.mini_batches, 1, config.learner.token_budget).of_rank(0)
    held: dict[int, Any] = dict(enumerate(payloads))
    return rollout_batch(4, places, held, advantages, [0.5] * 8, VOCABULARY, device)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"proximal": "compare", "kl_coef": 0.1, "entropy_coef": 0.01},
        {"proximal": "rollout", "loss": "gspo", "aggregation": "seq-mean-token-mean"},
        {"proximal": "interpolate", "loss": "sapo", "negative_max_prob": 0.9},
        {"loss": "double_sided", "aggregation": "seq-mean-token-sum-norm", "ess_lr": "sqrt"},
    ],
    ids=["default", "penalties", "gspo", "interpolate", "double-sided"],
)
def test_a_batch_trained_on_elsewhere_has_the_same_metrics(
    model: str, tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    there = metrics_of(model, tmp_path, other_device.DEVICE, algorithm)
    here = metrics_of(model, tmp_path, CPU, algorithm)
    assert there == pytest.approx(here, rel=1e-4, abs=1e-5)
