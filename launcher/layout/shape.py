"""Reads a model's shape from its `config.json`, which gives its number of parameters and the size of its cache."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Keys of `config.json` with the number of experts in a layer, and keys that make some layers differ from others.
EXPERTS = ("num_experts", "num_local_experts")
UNEVEN: dict[str, Any] = {"n_routed_experts": None, "mlp_only_layers": [], "decoder_sparse_step": 1}


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder."""

    layers: int
    hidden: int
    intermediate: int  # width of a layer's gated block, or of each of its experts
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    experts: int = 1  # in a layer; 1: a layer has one gated block for all tokens
    shared: int = 0  # width of the expert that computes every token; 0 without one

    @property
    def parameters(self) -> float:
        """The number of parameters, without those of norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        blocks = 3 * self.hidden * (self.intermediate * self.experts + self.shared)
        embeddings = self.hidden * self.vocabulary * (1 if self.tied else 2)
        return float(self.layers * (attention + router + blocks) + embeddings)

    @property
    def cache_bytes(self) -> float:
        """Bytes of one token's keys and values, in 16 bits."""
        return 4.0 * self.layers * self.kv_heads * self.head_dim


def read_shape(path: Path) -> Shape:
    """The shape of a model folder; raises `ValueError` for a mixture of experts whose layers differ."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    heads, width = config["num_attention_heads"], config["intermediate_size"]
    experts = next((config[name] for name in EXPERTS if config.get(name)), 1)
    if experts > 1:
        for name, usual in UNEVEN.items():
            if config.get(name, usual) not in (None, usual):
                raise ValueError(f"mixtures with {name} = {config[name]} are not supported")
        width = config.get("moe_intermediate_size") or width
    return Shape(
        config["num_hidden_layers"],
        config["hidden_size"],
        width,
        heads,
        config.get("num_key_value_heads") or heads,
        config.get("head_dim") or config["hidden_size"] // heads,
        config["vocab_size"],
        config.get("tie_word_embeddings", False),
        experts,
        (config.get("shared_expert_intermediate_size") or 0) if experts > 1 else 0,
    )
