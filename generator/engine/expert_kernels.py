"""Which of vLLM's kernels compute the experts of a mixture."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase


def expert_kernels(model: nn.Module) -> list[str]:
    """Names of the kernels that compute the experts of a mixture; none if the model is dense.

    vLLM transforms experts after it first loads them, differently for each of its kernels. If it leaves out a part of
    this at an update, only log-probs show it.
    """
    named = (getattr(method, "unquantized_backend", None) or type(method).__name__ for method in expert_methods(model))
    return sorted({str(getattr(kernels, "value", kernels)) for kernels in named})


def expert_methods(model: nn.Module) -> Iterator[FusedMoEMethodBase]:
    """How vLLM computes the experts of each layer of a mixture."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, FusedMoEMethodBase):
            yield method
