"""Tiny multimodal models, with random weights, in the layout of published ones: one row for each family."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from launcher.quickstart.tiny_model import build_tokenizer
from tests.support.families import FAMILIES, SHAPE, WINDOWS

VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = {"image_size": 32, "patch_size": 16}
EXPERTS = {"num_local_experts": 4, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 96, "use_qk_norm": False}


@dataclass(frozen=True, slots=True)
class Multimodal:
    """A family of multimodal models.

    Attributes:
        body: prefix of the language part's weights in published files.
        text, vision, whole: settings of the two parts and of the whole, beside `SHAPE`.
        dtype: the type in which vLLM computes it on a CPU.
    """

    body: str
    text: dict[str, Any]
    vision: dict[str, Any]
    whole: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"


MULTIMODAL: dict[str, Multimodal] = {
    "qwen3_5": Multimodal(
        "model.language_model.",
        FAMILIES["Qwen3.5"].own,
        {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
        | {"num_position_embeddings": 16},
        dtype="bfloat16",
    ),
    "gemma3": Multimodal("language_model.model.", WINDOWS, VISION | PATCHES, {"mm_tokens_per_image": 4}),
    "gemma4": Multimodal(
        "model.language_model.",
        FAMILIES["Gemma 4"].own,
        VISION | {"num_key_value_heads": 2, "head_dim": 16},
        {"audio_config": None},
    ),
    "mistral3": Multimodal(
        "language_model.model.",
        {"model_type": "ministral3"},
        VISION | PATCHES | {"model_type": "pixtral", "head_dim": 16},
    ),
    "llama4": Multimodal(
        "language_model.model.",
        EXPERTS,
        VISION | PATCHES | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
}


def tiny_multimodal(kind: str, **text: Any) -> PreTrainedModel:
    """A model in float32; `text` replaces settings of its language part."""
    row, tokenizer = MULTIMODAL[kind], build_tokenizer()
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    sizes = SHAPE | ids | row.text | text
    vision = row.vision | ({"out_hidden_size": sizes["hidden_size"]} if "out_hidden_size" in row.vision else {})
    tied = {"tie_word_embeddings": sizes["tie_word_embeddings"]}
    config = AutoConfig.for_model(kind, text_config=sizes, vision_config=vision, **tied, **row.whole)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # a buffer that published files hold
                buffer.fill_(0.5)
    return model.float().eval()


def save_multimodal(folder: Path | str, kind: str, **text: Any) -> PreTrainedModel:
    """Write such a model, with the tokenizer of the tiny models, into a folder."""
    model = tiny_multimodal(kind, **text)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return model
