"""Recomputing layers changes memory and time, not gradients; `selective` computes less again than `true`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learner.memory_model import Micro, peak_activations
from learner.policy.attention import PACKED_SDPA, pack_sequences
from learner.policy.checkpointing import SELECTIVE, recompute_layers
from learner.policy.model import Policy
from tests.support.families import config_of, tiny

LENGTHS = [7, 20, 5]
HOW = (False, SELECTIVE, True)


class Counted(TorchDispatchMode):
    """Counts the operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.calls[operation.overloadpacket.__name__] += 1
        return operation(*arguments, **(named or {}))

    def of(self, *names: str) -> int:
        return sum(self.calls[name] for name in names)


def trained(family: str, how: Any) -> tuple[dict[str, torch.Tensor], Counted]:
    """The gradients of a model, and the operations that it took."""
    model = tiny(family)
    model.set_attn_implementation(PACKED_SDPA)
    recompute_layers(model.train(), how)
    policy, tokens = Policy(model, chunk=64, temperature=1.0), sum(LENGTHS)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    ids, predict = torch.arange(tokens) % 50, torch.arange(tokens - 1)
    with Counted() as counted:
        logprobs, _ = policy(ids[None], positions[None], pack_sequences(LENGTHS), predict, ids[1:])
        logprobs.sum().backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}, counted


@pytest.mark.parametrize("family", ["Llama", "gpt-oss", "Qwen3.5"])
def test_gradients_stay_and_selective_computes_fewer_products_again(family):
    gradients, counts = zip(*(trained(family, how) for how in HOW), strict=True)
    for others in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-6, atol=1e-7, msg=name)
    products = [counted.of("mm", "addmm") for counted in counts]
    assert products[0] <= products[1] < products[2]
    attention = [counted.of("_scaled_dot_product_flash_attention_for_cpu") for counted in counts]
    assert attention[0] == attention[1] < attention[2] or attention == [0, 0, 0]


def test_selective_takes_memory_between_all_and_nothing():
    config = config_of("Llama", num_hidden_layers=3, hidden_size=128, intermediate_size=384)
    whole, some, least = (peak_activations(config, Micro((256,) * 4, checkpointing=how), torch.float32) for how in HOW)
    assert least < some < (whole + least) / 2
