"""Routers take the experts that the engine chose, weigh them themselves, and report what they do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common.errors import UserError
from learner.policy.attention import PACKED_SDPA, pack_sequences
from learner.policy.model import Policy, load_policy
from learner.policy.routers import ROUTERS, Routing, routing_statistics
from learner.stats import Stats
from tests.support.families import save_tiny, tiny
from tests.support.learner import learner_config

LENGTHS, TOKENS, LAYERS, CHOSEN = [9, 5], 14, 2, 2
POSITIONS = torch.tensor([2, 3, 4, 9, 12])  # that predict model tokens
EXPERTS = {"Qwen3-MoE": 8, "Qwen2-MoE": 8, "Mixtral": 4, "gpt-oss": 8}


def policy_of(family: str, checkpointing: bool = False) -> Policy:
    model = tiny(family, seed=0)
    model.set_attn_implementation("eager" if family == "gpt-oss" else PACKED_SDPA)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Policy(model.train(), chunk=8, temperature=1.0)


def forward(policy: Policy, routing: Routing | None) -> torch.Tensor:
    ids = torch.arange(TOKENS)[None]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    logprobs, _ = policy(ids, positions, pack_sequences(LENGTHS), POSITIONS, POSITIONS + 1, routing=routing)
    return logprobs


def gradients(policy: Policy, loss: torch.Tensor) -> list[torch.Tensor]:
    policy.zero_grad()
    loss.backward()
    return [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in policy.parameters()]


def router_outputs(policy: Policy, act: Callable[[], Any]) -> list[tuple[torch.Tensor, ...]]:
    """What each layer's router gives to its experts while `act` runs: logits, weights and ids."""
    outputs: list[tuple[torch.Tensor, ...]] = []
    routers = [part for part in policy.modules() if type(part).__name__ in ROUTERS]
    hooks = [router.register_forward_hook(lambda *call: outputs.append(call[2])) for router in routers]
    act()
    for hook in hooks:
        hook.remove()
    return outputs


def some_experts(family: str, seed: int = 0) -> torch.Tensor:
    """Ids that a router would hardly choose, uint8 [T, layers, k]."""
    rng = np.random.default_rng(seed)
    ids = [[rng.permutation(EXPERTS[family])[:CHOSEN] for _ in range(LAYERS)] for _ in range(TOKENS)]
    return torch.from_numpy(np.array(ids, np.uint8))


@pytest.mark.parametrize("family", EXPERTS)
def test_the_routers_own_choice_changes_nothing_if_replayed(family):
    policy = policy_of(family)
    plain = Routing(POSITIONS)
    own = router_outputs(policy, lambda: forward(policy, plain))
    experts = torch.stack([ids for _, _, ids in own], 1).to(torch.uint8)
    replay = Routing(POSITIONS, experts, torch.ones(TOKENS, dtype=torch.bool))
    expected, logprobs = forward(policy, None), forward(policy, replay)
    assert torch.equal(logprobs, expected)
    assert not any(layer.differs.any() for layer in replay.layers.values())
    for one, other in zip(gradients(policy, logprobs.sum()), gradients(policy, expected.sum()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", EXPERTS)
def test_replayed_experts_get_the_routers_own_weights(family):
    policy = policy_of(family)
    experts, known = some_experts(family), torch.arange(TOKENS) % 5 != 4
    routing = Routing(POSITIONS, experts, known)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    block = policy.model.base_model.layers[1].mlp
    block.register_forward_hook(lambda module, arguments, output: seen.append((arguments[0], output)))
    own = router_outputs(policy, lambda: forward(policy, None))[1][2]
    seen.clear()
    logits, weights, taken = router_outputs(policy, lambda: forward(policy, routing))[1]
    assert torch.equal(taken[known], experts[known, 1].long())
    assert not torch.equal(taken[known], own[known])
    expected_weights = logits.softmax(-1).gather(-1, taken)
    if getattr(block, "gate", None) is None or getattr(block.gate, "norm_topk_prob", True):
        expected_weights = expected_weights / expected_weights.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected_weights)
    if family == "gpt-oss":
        return
    (hidden, output) = seen[0]
    hidden = hidden[0].detach().requires_grad_()
    expected = brute_force(block, hidden, taken)
    torch.testing.assert_close(output[0], expected, rtol=1e-4, atol=1e-5)
    # The gradient goes to the router too.
    direction = torch.randn_like(expected)
    (gate,) = torch.autograd.grad(output[0], [block.gate.weight], direction)
    (expected_gate,) = torch.autograd.grad(expected, [block.gate.weight], direction)
    assert gate.abs().max() > 0
    torch.testing.assert_close(gate, expected_gate, rtol=1e-4, atol=1e-5)


def brute_force(block: Any, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A layer of experts, token by token and expert by expert [T, H]."""
    rows = []
    for token, chosen in zip(hidden, ids.tolist(), strict=True):
        probabilities = (block.gate.weight @ token).softmax(-1)
        weights = [probabilities[expert] for expert in chosen]
        if getattr(block.gate, "norm_topk_prob", True):
            weights = [weight / sum(weights) for weight in weights]
        row = torch.zeros_like(token)
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
            row = row + weight * (block.experts.down_proj[expert] @ (nn.functional.silu(gate) * up))
        if hasattr(block, "shared_expert"):
            row = row + block.shared_expert_gate(token).sigmoid() * block.shared_expert(token)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("balanced", [False, True])
def test_activations_computed_again_take_the_same_experts(balanced):
    results = []
    for checkpointing in (False, True):
        policy = policy_of("Qwen3-MoE", checkpointing)
        routing = Routing(POSITIONS, some_experts("Qwen3-MoE"), torch.ones(TOKENS, dtype=torch.bool), balanced)
        loss = forward(policy, routing).sum() + routing.balance_loss() * balanced
        forward(policy, Routing(POSITIONS, some_experts("Qwen3-MoE", 1), torch.ones(TOKENS, dtype=torch.bool)))
        results.append([loss.detach(), *gradients(policy, loss)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("replays", [False, True])
def test_the_balance_loss_is_that_of_switch_transformers(replays):
    policy = policy_of("Qwen2-MoE")
    known = torch.ones(TOKENS, dtype=torch.bool) if replays else None
    routing = Routing(POSITIONS, some_experts("Qwen2-MoE") if replays else None, known, balanced=True)
    outputs = router_outputs(policy, lambda: forward(policy, routing))
    losses = []
    for logits, _, ids in outputs:
        mean = logits[POSITIONS].softmax(-1).mean(0)
        shares = [(ids[POSITIONS] == expert).sum() / (len(POSITIONS) * CHOSEN) for expert in range(8)]
        losses.append(8 * sum(share * mean[expert] for expert, share in enumerate(shares)))
    expected = sum(losses) / LAYERS
    torch.testing.assert_close(routing.balance_loss(), expected)
    gates = [layer.mlp.gate.weight for layer in policy.model.base_model.layers]
    balance = torch.autograd.grad(routing.balance_loss(), gates, retain_graph=True)
    for gradient, expected_gradient in zip(balance, torch.autograd.grad(expected, gates), strict=True):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, expected_gradient)


def test_statistics_of_routers_add_up_over_micro_batches():
    policy, stats, counts = policy_of("Qwen3-MoE"), Stats(), torch.zeros(LAYERS, 8)
    entropies, differs, replayed = 0.0, 0.0, 0
    for seed, positions in enumerate((POSITIONS, POSITIONS[:2], POSITIONS[:0])):
        known = torch.arange(TOKENS) < 10
        routing = Routing(positions, some_experts("Qwen3-MoE", seed), known)
        outputs = router_outputs(policy, lambda routing=routing: forward(policy, routing))
        stats.total("tokens", float(len(positions)))
        routing_statistics(routing, routing.balance_loss(), True, stats)
        replayed += int(known[positions].sum())
        for layer, (logits, _, ids) in enumerate(outputs):
            own = logits.topk(CHOSEN).indices.sort(-1).values
            counts[layer] += torch.bincount(ids[positions].flatten(), minlength=8)
            entropies += float(torch.distributions.Categorical(logits=logits.detach()).entropy()[positions].sum())
            differs += int((own != ids.sort(-1).values).any(-1)[positions].sum())
    loads, metrics = counts / counts.mean(1, keepdim=True), stats.reduce()
    assert replayed < 7
    assert metrics.pop("router/balance") > 0
    assert metrics == pytest.approx(
        {
            "router/load_max": loads.max().item(),
            "router/load_min": loads.min().item(),
            "router/load_max_mean": loads.amax(1).mean().item(),
            "router/load_min_mean": loads.amin(1).mean().item(),
            "router/entropy": entropies / (7 * LAYERS),
            "router/replayed": replayed / 7,
            "router/differs": differs / (replayed * LAYERS),
        },
        rel=1e-5,
    )


@pytest.mark.parametrize(("name", "value"), [("router_replay", "rollout"), ("router_balance", 0.1)])
def test_settings_about_routers_need_known_ones(name, value, model):
    families = "GptOss, Mixtral, Qwen2Moe, Qwen3Moe"
    line = rf"learner.{name} = '?{value}'? needs .* {families}; model.path = '{model}' is a Qwen3ForCausalLM$"
    with pytest.raises(UserError, match=line):
        load_policy(learner_config(model, "runs", **{name: value}))


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("num_local_experts", 6, ": its weights have other shapes than its config.json says: .*8.*not 6"),
        ("num_experts_per_tok", 9, "its config.json sends each token to 9 of 8 experts$"),
    ],
)
def test_a_mixture_that_is_not_as_its_file_says_is_refused(key, value, line, tmp_path):
    save_tiny(tmp_path, "Qwen3-MoE")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UserError, match=f"model.path = '{tmp_path}'.*{line}"):
        load_policy(learner_config(str(tmp_path), "runs"))
