"""A LoRA adapter in the policy, by peft: `learner.lora`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from common.config import LoraConfig
from common.errors import UserError

BODY, PART = "model.", "model.language_model."  # prefixes of a model of text, and of it within a multimodal model
ADAPTER = "default"  # peft's name of a model's only adapter
PREFIX = "base_model.model."  # what peft puts before the names of an adapter's tensors
BASE, A, B = "base_layer", "lora_A", "lora_B"  # peft's parts of a layer that has an adapter
# Kernels for Mamba multiply by this layer's weight without calling it, so peft refuses it in models of these types.
FUSED, FUSED_IN = "out_proj", {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}


def add_adapter(model: PreTrainedModel, lora: LoraConfig, path: str, seed: int) -> None:
    """Freeze the model and give its targets adapters that change nothing yet, the same on every rank.

    Raises:
        UserError: the model has no such layers; the message names those it has.
    """
    from peft import inject_adapter_in_model

    settings = _peft_config(lora, _targets(model, lora, path), path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The list hides the model's type: for some types peft would adapt experts too, whose names in the files end
        # like those of other layers.
        inject_adapter_in_model(settings, nn.ModuleList([model]), ADAPTER)


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The adapter's parameters under the names that they have in a peft adapter on disk.

    If the model is the language part of a multimodal one, they are names of the whole model.
    """
    body = PART if getattr(model, "is_part", False) else BODY
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield PREFIX + name.replace(f".{ADAPTER}.", ".").replace(BODY, body, 1), parameter


def layer_and_part(model: nn.Module, name: str) -> tuple[str, str]:
    """Split a name of `adapter_weights` into the model's name of the layer and the part of its adapter."""
    layer, _, part = name.removeprefix(PREFIX).partition(".lora_")
    return layer.replace(PART, BODY, 1) if getattr(model, "is_part", False) else layer, f"lora_{part}"


def without_adapter(name: str) -> str:
    """The name that a layer's parameter has in a model without adapters."""
    return name.replace(f".{BASE}.", ".")


def merged_weights(model: nn.Module, partitioned: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter of the model whole and with the adapter added, W + alpha / rank B A, by the model's name.

    Computed in float32 and rounded once, as the generators do if `learner.lora.serve` is `merged`. All ranks must
    consume this together.

    Args:
        partitioned: whether the parameters lie in pieces on all ranks (ZeRO 3).
    """
    layers = _adapted_layers(model)
    for name, parameter in model.named_parameters():
        layer_name, _, rest = name.rpartition(f".{BASE}.")
        layer = layers.get(layer_name)
        if layer is None:
            if f".{ADAPTER}." not in name:
                with _gathered([parameter], partitioned):
                    yield name, parameter.detach()
            continue
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        with _gathered([parameter, a, b], partitioned), torch.no_grad():
            added = layer.scaling[ADAPTER] * (b.float() @ a.float()) if rest == "weight" else 0.0
            yield f"{layer_name}.{rest}", (parameter.float() + added).to(parameter.dtype)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Within the block the model computes as if it had no adapter.

    The adapter is computed and multiplied with 0, which is cheap: layers and gradients stay as DeepSpeed knows them.
    """
    layers = _adapted_layers(model).values()
    for layer in layers:
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


def save_adapter(
    weights: dict[str, torch.Tensor], model: PreTrainedModel, lora: LoraConfig, path: str, folder: Path
) -> None:
    """Write whole adapter weights, as `adapter_weights` names them, for `PeftModel.from_pretrained`."""
    folder.mkdir(parents=True)
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    file = folder / "adapter_model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    targets = sorted({name.rpartition(".")[2] for name in _adapted_layers(model)})
    _peft_config(lora, targets, path, inference_mode=True).save_pretrained(folder)
    # safetensors makes files that only their owner can read, whatever the umask.
    file.chmod((folder / "adapter_config.json").stat().st_mode)


def _peft_config(lora: LoraConfig, targets: list[str], path: str, inference_mode: bool = False) -> Any:
    import peft

    # No dropout: the policy that is trained must be the one that generates.
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
        inference_mode=inference_mode,
    )


def _targets(model: PreTrainedModel, lora: LoraConfig, path: str) -> list[str]:
    """The last parts of the names of all layers that get an adapter."""
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    if model.config.model_type in FUSED_IN:
        linear = [name for name in linear if not name.endswith(f".{FUSED}")]
    present = sorted({name.rpartition(".")[2] for name in linear})
    if not present:
        raise UserError(f"learner.lora: {type(model).__name__} (model.path = {path!r}) has no linear layers to adapt")
    if isinstance(lora.targets, str):
        return present
    absent = [target for target in lora.targets if not any(f".{name}".endswith(f".{target}") for name in linear)]
    if absent:
        is_mixture = any(name.endswith(".experts") for name, _ in model.named_modules())
        raise UserError(
            f"learner.lora.targets: {type(model).__name__} (model.path = {path!r}) has no linear layers called "
            f"{', '.join(absent)}; it has {', '.join(present)}" + (", and experts get no adapter" if is_mixture else "")
        )
    return lora.targets


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, BASE) and hasattr(module, A)}


def _gathered(parameters: list[nn.Parameter], partitioned: bool) -> Any:
    if not partitioned:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)
