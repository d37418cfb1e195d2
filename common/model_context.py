"""How many tokens a model was made for, read from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What models call it; where there are several, the least counts.
KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# Kinds of rotary embeddings whose models give the length as it is once it has been stretched.
ALREADY_SCALED = {"default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest text in tokens, as vLLM reckons it; None where the file leaves that open.

    Args:
        config: content of `config.json`.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        return None
    lengths = [value for key in KEYS if isinstance(value := text.get(key), int)]
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    stretched = isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type", "default")) not in ALREADY_SCALED
    if not lengths or stretched or "gemma3" in str(text.get("model_type")):
        return None
    # A model may allow more than it was made for.
    allowed = text.get("model_max_length")
    return max(min(lengths), allowed if isinstance(allowed, int) else 0)
