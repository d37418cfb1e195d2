"""The gradient is that of one loss, however the batch is packed, split and spread over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.support.learner import (
    job_batch,
    learner_config,
    make_samples,
    reference_logprobs,
    run_ranks,
)
from tests.support.learner_reference import Gradients, assert_close_gradients, plain_gradients

pytestmark = pytest.mark.integration

SAMPLES, SEED = 12, 3
# Each sample's two turns have advantages of their own.
TURNS = {"samples": SAMPLES, "seed": SEED, "gradients_only": True, "turns": True}
UNCORRECTED = {"correction": {"preset": "disabled"}}


def reference(model: str, samples: int = SAMPLES, **algorithm: Any) -> Gradients:
    """Gradients by plain forwards of one sample each and a whole log-softmax, in padded rows."""
    sections = {name: algorithm.pop(name) for name in ("generator",) if name in algorithm}
    config = learner_config(model, ".", algorithm=algorithm, **sections)
    return plain_gradients(config, make_samples(samples, seed=SEED))


AGGREGATIONS = ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def bypass(aggregation: str) -> dict[str, Any]:
    """Ratios far from 1, so that clipping and the aggregation matter."""
    return {"aggregation": aggregation, "proximal": "rollout", "clip_high": 5.0}


def quarter() -> int:
    """A token budget that makes four micro-batches."""
    payloads, _ = make_samples(SAMPLES, seed=SEED)
    return sum(len(payload.token_ids) for payload in payloads) // 4 + 30


def jobs(model: str, **learners: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {"model": model, "learner": learner, "samples": SAMPLES, "seed": SEED, "gradients_only": True}
        for name, learner in learners.items()
    }


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Jobs of one rank."""
    todo = jobs(
        model,
        packed={"token_budget": 4096},
        quarters={"token_budget": quarter()},
        temperature={"token_budget": 256, "generator": {"temperature": 0.7}},
        recomputed={"token_budget": 4096, "gradient_checkpointing": True, "logprob_chunk": 7},
    )
    todo["turns"] = TURNS | {"model": model, "learner": {"token_budget": quarter(), "algorithm": UNCORRECTED}}
    return run_ranks(1, todo, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def pair(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Jobs of two ranks."""
    todo = jobs(model, **{name: {"token_budget": 128, "algorithm": bypass(name)} for name in AGGREGATIONS})
    todo |= jobs(model, **{f"stage {stage}": {"token_budget": 160, "zero_stage": stage} for stage in range(4)})
    lonely = jobs(model, **{f"lonely {stage}": {"zero_stage": stage} for stage in (0, 2, 3)})
    todo |= {name: job | {"samples": 1} for name, job in lonely.items()}
    return run_ranks(2, todo, tmp_path_factory.mktemp("pair"))


def test_packed_gradients_equal_padded_ones(model, alone):
    assert_close_gradients(alone["packed"]["gradients"], reference(model))


def test_four_micro_batches_equal_one(alone):
    assert_close_gradients(alone["quarters"]["gradients"], alone["packed"]["gradients"])


def test_gradient_checkpointing_and_small_chunks_change_nothing(alone):
    assert_close_gradients(alone["recomputed"]["gradients"], alone["packed"]["gradients"])


def test_temperature_is_part_of_the_policy(model, alone):
    assert_close_gradients(alone["temperature"]["gradients"], reference(model, generator={"temperature": 0.7}))


def test_each_turn_is_weighed_by_its_own_advantage(model, alone):
    # On-policy the loss of a token is -A times its ratio, which is 1; by hand, with a plain forward a sample.
    payloads, advantages = job_batch(TURNS, 0)
    policy = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, tokens = torch.zeros(()), 0
    for payload, (first, second) in zip(payloads, advantages, strict=True):
        logprobs = reference_logprobs(policy, payload)
        (start, end), _ = payload.model_spans.tolist()
        total = total - first * logprobs[: end - start].sum() - second * logprobs[end - start :].sum()
        tokens += len(logprobs)
    (total / tokens).backward()
    expected = {name: parameter.grad for name, parameter in policy.named_parameters()}
    assert_close_gradients(alone["turns"]["gradients"], expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_equal_one_in_every_zero_stage(alone, pair, stage):
    found, expected = pair[f"stage {stage}"], alone["packed"]
    assert_close_gradients(found["gradients"], expected["gradients"])
    for name, value in expected["metrics"][0].items():
        if name != "tokens/per_second":
            assert found["metrics"][0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rank_without_samples_takes_part_and_contributes_nothing(model, pair, stage):
    assert_close_gradients(pair[f"lonely {stage}"]["gradients"], reference(model, samples=1))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_has_one_global_denominator(model, pair, aggregation):
    assert_close_gradients(pair[aggregation]["gradients"], reference(model, **bypass(aggregation)))
