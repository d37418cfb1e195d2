"""Packed sequences get what transformers gives each alone, in layers of every kind; a start refuses what differs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import UserError
from learner.batch.prefixes import pack_rows
from learner.policy.attention import PACKED_SDPA, pack_sequences
from learner.policy.forward_check import as_transformers, check_critic, check_policy
from learner.policy.model import Policy, load_policy
from learner.policy.packing import Packing
from tests.support.families import save_tiny, tiny
from tests.support.learner import learner_config

# One family for each kind of layer.
KINDS = [
    "Llama",
    "Nemotron",  # hands no arguments down to its attention
    "OLMo 3",
    "gpt-oss",
    "Gemma 2",
    "Cohere 2",
    "Qwen3.5",
    "Kimi-Linear",
    "MiniMax",
    "LFM2",
    "Falcon-H1",
    "Nemotron-H",
    "Granite-4",
    "GLM-5",
]
STATES = ["Qwen3.5", "LFM2", "Nemotron-H"]
LENGTHS = [9, 66, 5]  # linear attention computes chunks of 64 tokens


def policy_of(family: str, checkpointing: bool = False) -> Policy:
    model = tiny(family)
    model.set_attn_implementation(PACKED_SDPA)
    model.config._attn_implementation_internal = PACKED_SDPA  # some classes refuse to change theirs
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Policy(model.train(), chunk=16, temperature=1.0)


def some_rows(policy: Policy, lengths: list[int]) -> list[np.ndarray]:
    tokens = np.random.default_rng(1).integers(0, policy.vocabulary, sum(lengths))
    return np.split(tokens, np.cumsum(lengths)[:-1])


def packed(policy: Policy, rows: list[np.ndarray], share: bool = False) -> torch.Tensor:
    """Log-probs of every token but the first of each row, packed."""
    tokens = pack_rows([row.astype(np.uint32) for row in rows], share)
    lengths = [len(row) for row in rows]
    assert (tokens.places is not None) == share
    sequences = pack_sequences(lengths, places=tokens.places)
    places = np.arange(sum(lengths)) if tokens.places is None else tokens.places
    ends = np.cumsum(lengths)
    predict = torch.from_numpy(
        np.concatenate([places[end - n : end - 1] for end, n in zip(ends, lengths, strict=True)])
    )
    targets = torch.from_numpy(np.concatenate([row[1:] for row in rows]))
    ids, positions = torch.from_numpy(tokens.tokens)[None], torch.from_numpy(tokens.positions)[None]
    order = torch.argsort(predict, stable=True)
    logprobs, _ = policy(ids, positions, sequences, predict[order], targets[order])
    return logprobs[torch.argsort(order)]


def alone(policy: Policy, rows: list[np.ndarray]) -> torch.Tensor:
    """The same by transformers' own forward pass, one row at a time."""
    parts = []
    policy.packing.sequences = None
    with as_transformers(policy.model):
        for row in map(torch.from_numpy, rows):
            logits = policy.model(input_ids=row[None], use_cache=False).logits[0, :-1]
            parts.append(logits.log_softmax(-1).gather(1, row[1:, None])[:, 0])
    return torch.cat(parts)


def gradients(policy: Policy, logprobs: torch.Tensor) -> list[torch.Tensor | None]:
    policy.zero_grad()
    (logprobs * torch.arange(len(logprobs)).cos()).sum().backward()
    return [None if one.grad is None else one.grad.clone() for one in policy.parameters()]


@pytest.mark.parametrize("family", KINDS)
def test_log_probs_and_gradients_are_those_of_each_row_alone(family: str) -> None:
    policy = policy_of(family)
    rows = some_rows(policy, LENGTHS)
    expected = alone(policy, rows)
    of_expected = gradients(policy, expected)
    together = packed(policy, rows)
    torch.testing.assert_close(together, expected, atol=2e-5, rtol=0)
    # A sum over many tokens, in another order.
    torch.testing.assert_close(gradients(policy, together), of_expected, atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("family", STATES)
@pytest.mark.parametrize("way", ["computed again in the backward pass", "with a common beginning"])
def test_layers_with_a_state_do_so(family: str, way: str) -> None:
    policy, shares = policy_of(family), way.endswith("beginning")
    rows = some_rows(policy, LENGTHS)
    if shares:
        rows = [np.concatenate([rows[1][:60], row]) for row in rows]
    expected = alone(policy, rows)
    of_expected = gradients(policy, expected)
    policy = policy_of(family, checkpointing=not shares)
    together = packed(policy, rows, share=shares)
    torch.testing.assert_close(together, expected, atol=2e-5, rtol=0)
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
    with pytest.raises(
        UserError, match=r"^learner.sequence_parallel = 2: .*model.layers.0.conv\), which need sequences"
    ):
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


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            rolling,
            r"Qwen3ForCausalLM computes other log-probs .* alone: [\d.]+ apart on average \(rounding explains 0.0001",
        ),
        (scaled, r"computes other log-probs"),
        (failing, r"Qwen3ForCausalLM cannot compute packed sequences: got an unexpected keyword argument"),
    ],
)
def test_a_start_refuses_what_is_not_computed_exactly(change, line: str) -> None:
    policy = policy_of("Qwen3")
    change(policy)
    with pytest.raises(UserError, match=rf"^model.path = 'here': .*{line}"):
        check_policy(Engine(policy), "here")


def test_too_little_memory_is_not_the_models_fault() -> None:
    policy = policy_of("Qwen3")

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    policy.model.base_model.forward = full
    with pytest.raises(torch.OutOfMemoryError):
        check_policy(Engine(policy), "here")


def test_a_critic_of_another_model_is_asked_too() -> None:
    policy = policy_of("Qwen3")
    rolling(policy)
    with pytest.raises(UserError, match=r"^critic.model = 'there': .* computes other hidden states"):
        check_critic(Engine(policy), "there", "critic.model")
