"""Tiny models of the families that people train, with random weights: one row for each family."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from launcher.quickstart.tiny_model import build_tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "bos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
WINDOWS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TWO_OF_8: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
# vLLM's latent attention on a CPU has one size, 512 + 64.
LATENT: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64,
    "head_dim": 64, "num_key_value_heads": 2,
}  # fmt: skip
INDEXED: dict[str, Any] = LATENT | ROUTED | {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 128}
# vLLM's linear attention on a CPU computes in bfloat16, with heads that are 128 wide.
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
LINEAR_MIXTURE: dict[str, Any] = LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32}
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1}


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        type: `model_type` of its configuration.
        layers: the kinds of its layers, for the table.
        own: its own settings beside `SHAPE`.
        dtype: the type in which vLLM computes it on a CPU.
        why: why engine and learner, or learner and export, do not agree, if they do not.
    """

    type: str
    layers: str
    own: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    why: str = ""


NEEDS_TRITON = "vLLM computes it with Triton's kernels, which a CPU lacks"
NO_SPARSE = "vLLM has no sparse attention on a CPU"
NOT_IN_VLLM = "vLLM 0.32 has no class for it any more"
DENSE, MIXTURE, LINEAR_ATTENTION = "attention", "attention, experts", "linear attention, attention"
SLIDING = "sliding and full attention"
FAMILIES: dict[str, Family] = {
    "Llama": Family("llama", DENSE),
    "Mistral": Family("mistral", DENSE),
    "Qwen2": Family("qwen2", DENSE),
    "Qwen3": Family("qwen3", DENSE),
    "Qwen3 in bfloat16": Family("qwen3", DENSE, {}, "bfloat16"),
    "Phi-3": Family("phi3", DENSE),
    "OLMo 2": Family("olmo2", DENSE),
    "OLMo 3": Family("olmo3", SLIDING, WINDOWS),
    "SmolLM3": Family("smollm3", DENSE),
    "Gemma 2": Family("gemma2", f"{SLIDING}, soft caps", {"sliding_window": 16, "tie_word_embeddings": True}),
    "Gemma 3": Family("gemma3_text", SLIDING, WINDOWS),
    "Gemma 4": Family(
        "gemma4_text",
        SLIDING,
        WINDOWS | {"global_head_dim": 32, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 16},
    ),
    "Granite": Family("granite", "attention, scales", {"logits_scaling": 4.0, "residual_multiplier": 0.5}),
    "GLM-4": Family("glm4", DENSE),
    "Seed-OSS": Family("seed_oss", DENSE),
    "Ministral 3": Family("ministral3", DENSE),
    "Exaone 4": Family("exaone4", SLIDING, WINDOWS),
    "Hunyuan": Family("hunyuan_v1_dense", DENSE),
    "Nemotron": Family("nemotron", DENSE),
    "Apertus": Family("apertus", DENSE),
    "Cohere": Family("cohere", "attention, scale", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "Cohere 2": Family("cohere2", f"{SLIDING}, scale", WINDOWS | {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "Qwen2-MoE": Family("qwen2_moe", MIXTURE, EXPERTS | {"shared_expert_intermediate_size": 64}),
    "Qwen3-MoE": Family("qwen3_moe", MIXTURE, EXPERTS | {"norm_topk_prob": True}),
    "Qwen3-MoE in bfloat16": Family("qwen3_moe", MIXTURE, EXPERTS | {"norm_topk_prob": True}, "bfloat16"),
    "Mixtral": Family("mixtral", MIXTURE, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": Family("gpt_oss", f"{SLIDING} with sinks, experts", TWO_OF_8 | {"sliding_window": 16}),
    "OLMoE": Family("olmoe", MIXTURE, {"num_experts": 8, "num_experts_per_tok": 2}),
    "GLM-4-MoE": Family("glm4_moe", MIXTURE, ROUTED),
    "Granite-MoE": Family("granitemoe", MIXTURE, TWO_OF_8),
    "ERNIE-4.5-MoE": Family(
        "ernie4_5_moe",
        MIXTURE,
        {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    ),
    "DeepSeek-V3": Family(
        "deepseek_v3",
        "latent attention, experts",
        LATENT | ROUTED | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "MiniMax-M2": Family(
        "minimax_m2",
        MIXTURE,
        TWO_OF_8 | {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "MiMo-V2-Flash": Family(
        "mimo_v2_flash",
        f"{SLIDING}, experts",
        ROUTED
        # What vLLM reads beside transformers' own settings, as in the published configuration.
        | {"hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "sliding_window": 16, "sliding_window_size": 16}
        | {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 32, "swa_v_head_dim": 32}
        | {"v_head_dim": 32, "layernorm_epsilon": 1e-5, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        | {"add_swa_attention_sink_bias": True, "partial_rotary_factor": 0.334, "rope_theta": 5e6}
        | {"swa_rope_theta": 1e4},
    ),
    "Qwen3.5": Family("qwen3_5_text", LINEAR_ATTENTION, LINEAR, "bfloat16"),
    "Qwen3.5-MoE": Family("qwen3_5_moe_text", f"{LINEAR_ATTENTION}, experts", LINEAR_MIXTURE, "bfloat16"),
    "Qwen3-Next": Family("qwen3_next", f"{LINEAR_ATTENTION}, experts", LINEAR_MIXTURE, "bfloat16"),
    "OLMo hybrid": Family("olmo_hybrid", LINEAR_ATTENTION, LINEAR, "bfloat16", NEEDS_TRITON),
    "Kimi-Linear": Family(
        "kimi_linear",
        "linear and latent attention, experts",
        LATENT
        | TWO_OF_8
        | {"moe_intermediate_size": 32, "n_shared_experts": 1}
        | {"linear_num_heads": 2, "linear_head_dim": 64, "layer_types": ["linear_attention", "full_attention"]},
        "bfloat16",
        "on a CPU vLLM refuses its block size, or with `enable_prefix_caching: false` lacks Triton's kernels for it",
    ),
    "MiniMax": Family(
        "minimax",
        f"{LINEAR_ATTENTION}, experts",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["linear_attention", "full_attention"]},
        why=NOT_IN_VLLM,
    ),
    "LFM2": Family(
        "lfm2",
        "short convolutions, attention",
        {"layer_types": ["conv", "full_attention"], "conv_dim": 64, "block_dim": 64, "block_multiple_of": 32}
        | {"tie_word_embeddings": True},
    ),
    "Falcon-H1": Family("falcon_h1", "Mamba beside attention, scales", MAMBA | {"mamba_d_ssm": 128}),
    "Granite-4": Family(
        "granitemoehybrid",
        "Mamba, attention, experts, scales",
        MAMBA
        | {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 64, "mamba_expand": 2, "logits_scaling": 4.0},
    ),
    "Nemotron-H": Family(
        "nemotron_h",
        "Mamba, attention, feed-forward",
        {"hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "mamba_num_heads": 4, "mamba_head_dim": 32}
        | {"ssm_state_size": 32, "n_groups": 1},
    ),
    "Bamba": Family(
        "bamba", "Mamba, attention", MAMBA | {"attn_layer_indices": [1], "mamba_expand": 2}, why=NOT_IN_VLLM
    ),
    "DeepSeek-V3.2": Family("deepseek_v32", "indexed attention, experts", INDEXED, why=NO_SPARSE),
    "GLM-5": Family("glm_moe_dsa", "indexed attention, experts", INDEXED, why=NO_SPARSE),
}


def config_of(family: str, **shape: Any) -> PreTrainedConfig:
    """The configuration of a tiny model; `shape` replaces settings of its size."""
    row, tokenizer = FAMILIES[family], build_tokenizer()
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    return AutoConfig.for_model(row.type, **SHAPE | ids | row.own | shape)


def tiny(family: str, seed: int = 0, **shape: Any) -> PreTrainedModel:
    """A model in float32 whose weights are large enough for every layer to matter."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(family, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return model.float().eval()


def save_tiny(folder: Path | str, family: str, seed: int = 0, **shape: Any) -> PreTrainedModel:
    """Write such a model, with the tokenizer of the tiny models, into a folder."""
    model = tiny(family, seed, **shape)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return model
