"""The gradient is that of one loss, however the batch is packed, split and spread over ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from common.config import AlgorithmConfig
from learner.correction import correct
from learner.losses import Denominators, policy_loss
from tests.learner_tools import learner_config, make_batch, make_samples, reference_logprobs, run_ranks, save_tiny_model

pytestmark = pytest.mark.integration

SAMPLES, SEED = 12, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def gradients(model: str, folder: Path, ranks: int = 1, **learner: Any) -> dict[str, Any]:
    """Gradients of the learner on one batch, by the rank program."""
    folder.mkdir(exist_ok=True)
    spec = {
        "model": model,
        "folder": str(folder),
        "learner": learner,
        "samples": SAMPLES,
        "seed": SEED,
        "steps": 1,
        "gradients_only": True,
        "out": str(folder / "found.pt"),
    }
    run_ranks(ranks, spec, folder)
    return torch.load(folder / "found.pt")


def reference(model: str, config: AlgorithmConfig, horizon: float, temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """Gradients by plain forwards of one sample each and a whole log-softmax, in padded rows."""
    policy = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    payloads, advantages = make_samples(SAMPLES, seed=SEED)
    pad = torch.nn.utils.rnn.pad_sequence
    logprobs = pad([reference_logprobs(policy, payload, temperature) for payload in payloads], batch_first=True)
    rollout = pad([torch.from_numpy(payload.logprobs.copy()) for payload in payloads], batch_first=True)
    sizes = torch.tensor([len(payload.logprobs) for payload in payloads])
    mask = torch.arange(rollout.shape[1]) < sizes[:, None]
    denominators = dataclasses.replace(Denominators.of(mask), horizon=horizon)
    old = logprobs.detach() if config.mode == "decoupled" else rollout
    correction = correct(old, rollout, mask, config.correction) if config.mode == "decoupled" else None
    spread = torch.tensor(advantages)[:, None].expand_as(mask)
    loss, _ = policy_loss("ppo_clip", logprobs, old, spread, mask, config, correction, denominators)
    loss.backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.norm()
        assert scale > 0, name
        assert (found[name] - gradient).norm() <= 1e-5 * scale, name


@pytest.fixture(scope="module")
def packed(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank, everything in one micro-batch."""
    return gradients(model, tmp_path_factory.mktemp("packed"), token_budget=4096)


def test_packed_gradients_equal_padded_ones(model, packed):
    assert_equal(packed["gradients"], reference(model, AlgorithmConfig(), 1024))


@pytest.mark.parametrize("aggregation", ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_every_aggregation_has_one_global_denominator(model, tmp_path, aggregation):
    algorithm = {"aggregation": aggregation, "mode": "bypass", "clip_high": 5.0}
    found = gradients(model, tmp_path, ranks=2, token_budget=128, algorithm=algorithm)
    assert_equal(found["gradients"], reference(model, AlgorithmConfig(**algorithm), 1024))


def test_temperature_is_part_of_the_policy(model, tmp_path):
    found = gradients(model, tmp_path, token_budget=256, generator={"temperature": 0.7})
    assert_equal(found["gradients"], reference(model, AlgorithmConfig(), 1024, temperature=0.7))


def test_four_micro_batches_equal_one(model, packed, tmp_path):
    payloads, _ = make_samples(SAMPLES, seed=SEED)
    budget = sum(len(payload.token_ids) for payload in payloads) // 4 + 30
    found = gradients(model, tmp_path, token_budget=budget)
    assert_equal(found["gradients"], packed["gradients"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_equal_one_in_every_zero_stage(model, packed, tmp_path, stage):
    found = gradients(model, tmp_path, ranks=2, token_budget=160, zero_stage=stage)
    assert_equal(found["gradients"], packed["gradients"])
    for name, value in packed["metrics"][0].items():
        if not name.startswith("tokens/per_second"):
            assert found["metrics"][0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_gradient_checkpointing_and_small_chunks_change_nothing(model, packed, tmp_path):
    found = gradients(model, tmp_path, token_budget=4096, gradient_checkpointing=True, logprob_chunk=7)
    assert_equal(found["gradients"], packed["gradients"])


def test_the_configurations_really_differ_in_their_micro_batches(model):
    payloads, advantages = make_samples(SAMPLES, seed=SEED)
    total = sum(len(payload.token_ids) for payload in payloads)
    counts = [
        len(make_batch(learner_config(model, ".", token_budget=budget), payloads, advantages).mini_batches[0])
        for budget in (4096, total // 4 + 30)
    ]
    assert counts == [1, 4]
