"""Loads weights straight into the tensors that vLLM's kernels read: one copy, and no other memory.

vLLM's layerwise reloading creates every layer anew, loads it, processes it as after the first load, and copies the
result over the old one. If processing leaves weights as the checkpoint has them, as for an unquantised model on a GPU,
the model's own `load_weights` can overwrite them instead. On a CPU, linear layers and experts keep only a packed copy:
they are given memory to load into, and then packed again. There vLLM's reloading would leave experts unpacked, since it
packs them only after the first load.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform

from generator.engine.expert_kernels import expert_methods

PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class DirectLoad:
    """The load of one update, made by `of`: call `prepare`, the model's `load_weights`, then `finish`."""

    def __init__(self, packed: list[nn.Module], attention: list[nn.Module], dtype: torch.dtype) -> None:
        self._packed, self._attention, self._dtype = packed, attention, dtype

    @classmethod
    def of(cls, model: nn.Module, model_config: Any) -> Self | None:
        """Plan a load; None if vLLM has changed the weights in a way that only layerwise reloading can repeat."""
        if model_config.quantization is not None or (model_config.use_mla and not current_platform.is_cpu()):
            return None
        packed: list[nn.Module] = []
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            packs = method is not None and current_platform.is_cpu()
            has_experts = packs and _has_experts(layer)
            if method is not None and type(method) not in PLAIN and not has_experts:
                return None
            if packs:
                packed.append(layer)
            recorded, _ = get_layerwise_info(layer).restore_metadata
            for name, meta in recorded.items():
                tensor = layer._parameters.get(name)
                is_packed = packs and name == "weight" and tensor is not None and tensor.numel() == 0
                if not (is_packed or has_experts) and (tensor is None or not _same_layout(tensor, meta)):
                    return None
        attention = [layer for layer in model.modules() if is_deferred_attention_layer(layer)]
        return cls(packed, attention, model_config.dtype)

    def prepare(self) -> None:
        """Give packed layers memory to load into."""
        for layer in self._packed:
            recorded, _ = get_layerwise_info(layer).restore_metadata
            for name, meta in recorded.items():
                tensor: Any = layer._parameters[name]
                if _has_experts(layer) or tensor.numel() == 0:
                    fresh: Any = restore_layer_refs(materialize_meta_tensor(meta), layer)
                    delattr(layer, name)
                    layer.register_parameter(name, fresh)

    def finish(self) -> None:
        """Do what vLLM does after loading: pack weights, free the memory of `prepare`, process attention's scales."""
        for layer in self._packed:
            method: Any = layer.quant_method
            if _has_experts(layer):
                method.moe_kernel = None  # otherwise vLLM would do only what it does at an update
            method.process_weights_after_loading(layer)
        for layer in self._attention:
            process: Any = layer.process_weights_after_loading
            process(self._dtype)


def check_adapters(model: nn.Module) -> None:
    """Refuse a mixture of experts whose adapters vLLM would compute with kernels that are not here.

    Raises:
        ValueError: the machine lacks them.
    """
    if current_platform.is_cpu() and any(expert_methods(model)):
        raise ValueError(
            "with adapters vLLM computes a mixture of experts with Triton's kernels, which a CPU lacks; set "
            "learner.lora.serve=merged"
        )


def _has_experts(layer: nn.Module) -> bool:
    return isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod)


def _same_layout(tensor: torch.Tensor, meta: torch.Tensor) -> bool:
    return tensor.shape == meta.shape and tensor.stride() == meta.stride() and tensor.dtype == meta.dtype
