"""What vLLM must be started with to serve a LoRA adapter beside the model."""

from __future__ import annotations

from typing import Any, get_args

from common.config import Config, LoraConfig

MAX_ADAPTERS = 8  # versions at a time: each takes memory, and a request of one more waits


def lora_arguments(lora: LoraConfig, config: Config) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`.

    There is room for the versions that requests under way may have: as many as may be trained on, and the newest. The
    layers are named so that the output layer is left as it is: with an adapter there, which it would have otherwise,
    vLLM cannot score prompts.
    """
    from vllm.config.lora import MaxLoRARanks

    named = isinstance(lora.targets, list)
    return {
        "enable_lora": True,
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank),
        "max_loras": min(config.sampler.max_staleness + 2, MAX_ADAPTERS),
        "lora_target_modules": [name.rpartition(".")[2] for name in lora.targets] if named else _linear_layers(config),
    }


def _linear_layers(config: Config) -> list[str]:
    """The last parts of the names of all linear layers but the output layer, in transformers' model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path, trust = config.model.path, config.model.trust_remote_code
    with torch.device("meta"):
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=trust)
    head = model.get_output_embeddings()
    linear = (name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and part is not head)
    return sorted({name.rpartition(".")[2] for name in linear})
