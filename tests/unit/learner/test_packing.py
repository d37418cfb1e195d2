"""Packed sequences get what transformers gives each alone, in layers of every kind; a start refuses what differs."""

from __future__ import annotations

import re
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.config import LoraConfig
from common.errors import UserError
from learner.policy.attention import PACKED_SDPA
from learner.policy.forward_check import check_critic, check_policy
from learner.policy.lora import adapter_weights, add_adapter
from learner.policy.model import Policy, load_policy
from learner.policy.packing import Packing
from tests.support.families import save_tiny, tiny
from tests.support.learner import learner_config
from tests.support.packed_rows import alone, packed, some_rows

# One family for each kind of layer; gpt-oss has sinks, Gemma 2 soft caps, both windows.
KINDS = [
    "Llama", "OLMo 3", "gpt-oss", "Gemma 2", "Cohere 2", "Qwen3.5", "Kimi-Linear", "MiniMax", "LFM2", "Falcon-H1",
    "Nemotron-H", "Granite-4", "GLM-5",
    "Nemotron",  # hands no arguments down to its attention
]  # fmt: skip
STATES = ["Qwen3.5", "LFM2", "Nemotron-H"]  # layers with a state
WAYS = ["computed again in the backward pass", "with a common beginning", "with an adapter"]
LENGTHS = [9, 66, 5]  # linear attention computes chunks of 64 tokens


def policy_of(family: str, checkpointing: bool = False, has_adapter: bool = False) -> Policy:
    model = tiny(family)
    if has_adapter:
        add_adapter(model, LoraConfig(rank=4, alpha=8), family, seed=0)
        for name, weight in adapter_weights(model):
            torch.nn.init.normal_(weight, 0, 0.15, torch.Generator().manual_seed(len(name)))
    model.set_attn_implementation(PACKED_SDPA)
    model.config._attn_implementation_internal = PACKED_SDPA  # some classes refuse to change theirs
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Policy(model.train(), chunk=16, temperature=1.0, has_adapter=has_adapter)


def gradients(policy: Policy, logprobs: torch.Tensor) -> list[torch.Tensor | None]:
    policy.zero_grad()
    (logprobs * torch.arange(len(logprobs)).cos()).sum().backward()
    return [None if one.grad is None else one.grad.clone() for one in policy.parameters()]


@pytest.mark.parametrize(("family", "way"), [*((family, "as they are") for family in KINDS), *product(STATES, WAYS)])
def test_log_probs_and_gradients_are_those_of_each_row_alone(family: str, way: str) -> None:
    shares, has_adapter = way.endswith("beginning"), way.endswith("adapter")
    policy = policy_of(family, has_adapter=has_adapter)
    rows = some_rows(policy, LENGTHS)
    if shares:
        rows = [np.concatenate([rows[1][:60], row]) for row in rows]
    expected = alone(policy, rows)
    of_expected = gradients(policy, expected)
    policy = policy_of(family, checkpointing=way.startswith("computed"), has_adapter=has_adapter)
    together = packed(policy, rows, share=shares)
    torch.testing.assert_close(together, expected, atol=2e-5, rtol=0)
    # A sum over many tokens, in another order.
    torch.testing.assert_close(gradients(policy, together), of_expected, atol=2e-4, rtol=2e-3)


def test_only_layers_that_mix_tokens_otherwise_than_attention_are_computed_on_rows() -> None:
    assert {family: Packing(tiny(family)).states for family in ("Qwen3", "Qwen3.5", "Nemotron-H", "DeepSeek-V3.2")} == {
        "Qwen3": [],
        "Qwen3.5": ["model.layers.0.linear_attn"],
        "Nemotron-H": ["model.layers.0.mixer"],
        "DeepSeek-V3.2": ["model.layers.0.self_attn", "model.layers.1.self_attn"],
    }


def test_an_indexer_is_not_trained() -> None:
    frozen = [name for name, one in policy_of("DeepSeek-V3.2").named_parameters() if not one.requires_grad]
    assert frozen
    assert all(".indexer." in name for name in frozen)


def test_sequences_of_layers_with_a_state_are_not_divided(tmp_path) -> None:
    save_tiny(tmp_path / "model", "LFM2")
    line = r"^learner.sequence_parallel = 2: .*model.layers.0.conv\), which need sequences"
    with pytest.raises(UserError, match=line):
        load_policy(learner_config(str(tmp_path / "model"), "runs", sequence_parallel=2))


class Engine:
    """A policy or critic that is called as DeepSpeed's engine is."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)


@pytest.mark.parametrize("family", ["Qwen3", "gpt-oss", "Gemma 2", "LFM2", "Bamba"])
def test_a_start_finds_nothing_where_there_is_nothing(family: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        policy = policy_of(family).to(dtype)
        check_policy(Engine(policy), "here")
        check_critic(Engine(policy), "here", "critic.model")
        assert policy.model.config._attn_implementation == PACKED_SDPA


def rolling(policy: Policy) -> None:
    """Let a feed-forward layer read the token before, also that of another sequence."""
    layer = policy.model.model.layers[0].mlp
    own = layer.forward
    layer.forward = lambda hidden: own(hidden) + hidden.roll(1, dims=1)


def scaled(policy: Policy) -> None:
    """Let the model scale its logits by a setting that the learner does not know."""
    own = policy.model.forward

    def forward(**named: Any) -> Any:
        return SimpleNamespace(logits=own(**named).logits * 1.5)

    policy.model.forward = forward


def failing(policy: Policy) -> None:
    def forward(*_: Any, **__: Any) -> Any:
        raise TypeError("got an unexpected keyword argument 'position_ids'")

    policy.model.base_model.forward = forward


OTHER = r"Qwen3ForCausalLM computes other log-probs .* alone: [\d.]+ apart on average \(rounding explains 0.0001"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (rolling, OTHER),
        (scaled, r"computes other log-probs"),
        (failing, r"Qwen3ForCausalLM cannot compute packed sequences: got an unexpected keyword argument"),
    ],
)
def test_a_start_refuses_what_is_not_computed_exactly(change, line: str) -> None:
    policy = policy_of("Qwen3")
    change(policy)
    with pytest.raises(UserError, match=rf"^model.path = 'here': .*{line}"):
        check_policy(Engine(policy), "here")


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
LOST = RuntimeError("Connection closed by peer [10.0.0.2]:51162")


@pytest.mark.parametrize(("ranks", "error"), [(1, OUT_OF_MEMORY), (2, LOST)])
def test_neither_too_little_memory_nor_a_lost_rank_is_the_models_fault(ranks, error, monkeypatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranks > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    policy = policy_of("Qwen3")

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    policy.model.base_model.forward = fail
    with pytest.raises(type(error), match=re.escape(str(error))):
        check_policy(Engine(policy), "here")


def test_a_critic_of_another_model_is_asked_too() -> None:
    policy = policy_of("Qwen3")
    rolling(policy)
    with pytest.raises(UserError, match=r"^critic.model = 'there': .* computes other hidden states"):
        check_critic(Engine(policy), "there", "critic.model")
