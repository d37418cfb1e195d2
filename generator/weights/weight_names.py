"""Checks that an update has all weights of a model, by their names in the checkpoint.

vLLM packs several weights of a checkpoint into one (`q_proj`, `k_proj`, `v_proj` into `qkv_proj`), quantises some, and
gives quantised layers scales that no checkpoint has. So a layer's needs are read from what vLLM recorded before its
first load, and each part of a packed layer is checked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from generator.weights.direct_load import PLAIN

# What quantised layers load from an unquantised checkpoint; they compute the rest.
UNQUANTISED = ("weight", "bias")


def check_names(model: nn.Module, model_config: Any, names: Collection[str], loaded: Collection[str] | None) -> None:
    """Raise ValueError if an update lacks weights of the model, or vLLM cannot load such weights into it.

    Args:
        names: the update's, as checkpoints have them.
        loaded: the names that the model's `load_weights` returned, in vLLM's form; None if it returned none.
    """
    packing = _packing(model, model_config)
    missing = sorted(_missing_parts(names, packing))
    if loaded is not None:
        missing += sorted(expected_names(model, model_config) - set(loaded))
    if missing:
        raise ValueError(f"the update lacks {len(missing)} weights of the model, among them {missing[0]}")


def expected_names(model: nn.Module, model_config: Any) -> set[str]:
    """List what this worker's part of the model needs from an unquantised checkpoint, in vLLM's names.

    Raises:
        ValueError: the model was quantised on disk already, so that its layers take no unquantised weights.
    """
    expected = set()
    for path, layer in model.named_modules():
        if isinstance(layer, ParallelLMHead) and is_tied(layer, model, model_config):
            continue
        recorded, _ = get_layerwise_info(layer).restore_metadata
        method = getattr(layer, "quant_method", None)
        is_quantised = method is not None and type(method) not in PLAIN
        for leaf, tensor in recorded.items():
            if not is_quantised:
                expected.add(f"{path}.{leaf}")
            elif leaf in UNQUANTISED:
                if tensor.dtype.itemsize < 2:
                    raise ValueError(
                        f"{path}.{leaf} is {str(tensor.dtype).removeprefix('torch.')} in the model's files: updates "
                        "need an unquantised model.path, which generator.engine.quantization quantises as it is loaded"
                    )
                expected.add(f"{path}.{leaf}")
    return expected


def is_tied(head: nn.Module, model: nn.Module, model_config: Any) -> bool:
    """True if an output layer's weight is the embedding's; updates then have it once.

    The configuration says so, unless vLLM has reset it, as it does if the files hold an output layer too.
    """
    if model_config.hf_text_config.tie_word_embeddings:
        return True
    weight = _weight(head)
    return any(layer is not head and _weight(layer) is weight for layer in model.modules())


def _weight(layer: nn.Module) -> Any:
    """The weight that a layer's kernels read, even while layerwise reloading has replaced it."""
    kernel = get_layerwise_info(layer).kernel_tensors
    return (layer._parameters if kernel is None else kernel[0]).get("weight")


def _packing(model: nn.Module, model_config: Any) -> Mapping[str, list[str]]:
    """Maps a packed layer's name to those of the checkpoint's layers in it."""
    packing: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    if getattr(model_config.hf_text_config, "attention_k_eq_v", False):
        return {packed: [part for part in parts if part != "v_proj"] for packed, parts in packing.items()}
    return packing


def _missing_parts(names: Collection[str], packing: Mapping[str, list[str]]) -> set[str]:
    """Parts that are not in an update although others of the same packed layer are."""
    present, missing = set(names), set()
    for name in present:
        layer, _, leaf = name.rpartition(".")
        path, dot, part = layer.rpartition(".")
        for parts in packing.values():
            if part in parts:
                missing |= {f"{path}{dot}{other}.{leaf}" for other in parts} - present
    return missing
