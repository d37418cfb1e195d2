"""A LoRA adapter in the policy: where it goes, what it adds, and that without it the model is as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from common.errors import UserError
from learner.batch.tensors import Packer
from learner.policy.lora import adapter_off, adapter_weights, add_adapter, merged_weights
from learner.policy.model import Policy, load_policy
from tests.support.learner import VOCABULARY, learner_config, make_payload
from tests.support.mixtures import tiny_mixture

PREFIX = "base_model.model.model.layers"


def adapted(model: str, weights: bool = True, **lora: Any) -> Policy:
    return load_policy(learner_config(model, "runs", lora={"rank": 4, "alpha": 12} | lora), weights)


@pytest.fixture(scope="module")
def plain(model: str) -> Policy:
    return load_policy(learner_config(model, "runs"))


@torch.no_grad()
def moved(policy: Policy) -> Policy:
    """The policy with an adapter that changes something."""
    torch.manual_seed(1)
    for _, parameter in adapter_weights(policy.model):
        parameter.add_(0.1 * torch.randn_like(parameter))
    return policy


@torch.no_grad()
def logprobs(policy: Policy) -> torch.Tensor:
    micro = Packer(VOCABULARY).micro_batch([(make_payload(np.random.default_rng(0), 40), 0.0)])
    return policy(micro.input_ids, micro.position_ids, micro.sequences, micro.predict, micro.targets)[0]


def test_a_new_adapter_is_all_that_is_trained_and_sent(model, plain):
    one, other = adapted(model), adapted(model)
    names = {name for name, parameter in one.named_parameters() if parameter.requires_grad}
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    sent = dict(one.named_weights())
    assert len(sent) == len(names) == 2 * 7 * 2  # matrices, linear layers of a block, blocks
    assert sent[f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"].shape == (4, 64)
    assert sent[f"{PREFIX}.1.mlp.down_proj.lora_B.weight"].shape == (64, 4)
    assert torch.equal(logprobs(one), logprobs(plain))
    assert all(torch.equal(weight, sent[name]) for name, weight in other.named_weights()), "the same on every rank"


def test_chosen_layers_alone_get_an_adapter_also_without_weights(model):
    shape = dict(adapted(model, weights=False, targets=["v_proj", "mlp.up_proj"]).named_weights())
    assert {name.split(".")[-3] for name in shape} == {"v_proj", "up_proj"}
    assert {parameter.device.type for parameter in shape.values()} == {"meta"}


def test_switched_off_the_model_is_the_one_on_disk(model, plain):
    trained = moved(adapted(model))
    before = logprobs(trained)
    with adapter_off(trained):
        assert torch.equal(logprobs(trained), logprobs(plain))
    assert torch.equal(logprobs(trained), before)
    assert (before - logprobs(plain)).abs().max() > 0.01


def test_merged_weights_are_the_base_plus_the_scaled_product(model):
    original = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    trained = moved(adapted(model, targets=["o_proj"]))
    adapter, merged = dict(trained.named_weights()), dict(merged_weights(trained.model, partitioned=False))
    assert merged.keys() == original.keys()
    for name, weight in original.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        added = torch.zeros(())
        if f"{layer}.lora_A.weight" in adapter:
            added = 12 / 4 * adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
        torch.testing.assert_close(merged[name], weight + added, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ["proj"]])
def test_unknown_layers_are_refused_with_those_that_exist(model, targets):
    with pytest.raises(UserError) as refused:
        adapted(model, weights=False, targets=targets)
    assert f"Qwen3ForCausalLM (model.path = {model!r}) has no linear layers called {targets[-1]};" in str(refused.value)
    assert "it has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in str(refused.value)


def test_the_experts_of_a_mixture_get_no_adapter():
    target = "gate_up_proj"
    lora = learner_config("none", "runs", lora={"targets": ["q_proj", target]}).learner.lora
    with pytest.raises(UserError) as refused:
        add_adapter(tiny_mixture("Qwen3-MoE", 0), lora, "mixture", 0)
    end = f"has no linear layers called {target}; it has k_proj, o_proj, q_proj, v_proj, and experts get no adapter"
    assert str(refused.value).endswith(end)


def test_a_model_without_linear_layers_is_refused():
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=11, n_positions=16))
    lora = learner_config("none", "runs", lora={}).learner.lora
    assert lora is not None
    with pytest.raises(UserError, match=r"GPT2LMHeadModel \(model.path = 'gpt2'\) has no linear layers to adapt"):
        add_adapter(model, lora, "gpt2", 0)
