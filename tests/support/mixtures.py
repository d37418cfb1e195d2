"""Tiny mixtures of experts of several families, with random weights, on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from launcher.quickstart.tiny_model import build_tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Qwen3-MoE": (Qwen3MoeConfig, {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "Qwen2-MoE": (
        Qwen2MoeConfig,
        {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    ),
    "Mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "gpt-oss": (GptOssConfig, {"num_local_experts": 8, "sliding_window": 64}),
}


def tiny_mixture(family: str, seed: int, **shape: Any) -> PreTrainedModel:
    """A mixture whose experts differ, and whose router prefers some of them; `shape` replaces settings of its size."""
    torch.manual_seed(seed)
    kind, own = FAMILIES[family]
    tokenizer = build_tokenizer()
    config = kind(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **SHAPE | own | shape)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return model.float().eval()


def save_mixture(folder: Path | str, family: str, seed: int = 0, **shape: Any) -> PreTrainedModel:
    model = tiny_mixture(family, seed, **shape)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return model
