"""Counts the floating-point operations that a model needs for a sequence, from its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from learner.policy.packing import attentions

TRAINING = 3  # times the operations of a forward pass: a backward pass takes twice as many


@dataclass(frozen=True, slots=True)
class Operations:
    """Floating-point operations of a forward pass; training takes `TRAINING` times as many.

    Attributes:
        linear: per token.
        quadratic: per squared token of a sequence, in the layers whose attention reads the whole sequence.
        windows: the window in tokens, and operations per squared token up to it, of layers whose attention has one.
    """

    linear: float
    quadratic: float
    windows: tuple[tuple[int, float], ...] = ()

    def of(self, length: int) -> float:
        """Operations of a forward pass over one sequence of `length` tokens."""
        limited = sum(each * (length**2 - max(length - window, 0) ** 2) for window, each in self.windows)
        return self.linear * length + self.quadratic * length**2 + limited


def operations_of(config: PreTrainedConfig, trust_remote_code: bool = False) -> Operations:
    """Operations of the language model that `config` describes; nothing is computed and no weights are held.

    Counted are products with matrices, of experts those that a token is sent to, and causal attention. Norms,
    activations, embeddings and the state of linear attention or Mamba are below 1% in a large model, and left out.
    """
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text, trust_remote_code=trust_remote_code)
    quadratic, windows = 0.0, dict[int, float]()
    for layer in attentions(model):
        each, window = _per_squared_token(layer, text), _window(layer, text)
        if window is None:
            quadratic += each
        else:
            windows[window] = windows.get(window, 0.0) + each
    return Operations(2.0 * sum(_met(model)), quadratic, tuple(windows.items()))


def _met(model: Any) -> Iterator[float]:
    """Elements of each matrix that a token is multiplied by; experts count by the share of tokens sent to them."""
    head, shares = model.get_output_embeddings().weight, _expert_shares(model)
    embeddings = [id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)]
    yield head.numel()  # may be the embeddings' own
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim > 1 and not name.endswith("bias")  # experts' biases are stacked
        if is_matrix and parameter is not head and id(parameter) not in embeddings:
            yield parameter.numel() * next((shares[prefix] for prefix in shares if name.startswith(prefix)), 1.0)


def _expert_shares(model: nn.Module) -> dict[str, float]:
    """The share of its experts that each mixture sends a token to, by the prefix of the experts' parameters."""
    routers = [getattr(module, "top_k", None) for module in model.modules()]
    chosen = next((top_k for top_k in routers if isinstance(top_k, int)), None)
    mixtures = {name: experts for name, experts in model.named_modules() if name.rpartition(".")[2] == "experts"}
    return {f"{name}.": chosen / _count(experts) for name, experts in mixtures.items() if chosen}


def _count(experts: Any) -> int:
    return len(experts) if isinstance(experts, nn.ModuleList) else len(next(experts.parameters()))


def _per_squared_token(layer: Any, text: PreTrainedConfig) -> float:
    """Operations of causal attention: two products of 2 operations per number of a head, of half of all pairs."""
    keys = getattr(layer, "qk_head_dim", None) or layer.head_dim
    values = getattr(layer, "v_head_dim", None) or keys
    return float(getattr(layer, "num_heads", text.num_attention_heads) * (keys + values))


def _window(layer: Any, text: PreTrainedConfig) -> int | None:
    """Tokens that a layer's attention reads at most; None if it reads the whole sequence."""
    types = getattr(text, "layer_types", None)
    if types is None:
        return getattr(layer, "sliding_window", getattr(text, "sliding_window", None))
    widths = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}
    return getattr(text, widths.get(types[layer.layer_idx].partition("_")[0], ""), None)
