"""Recomputes a model's layers in the backward pass, wholly or without what is costly to compute again."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

SELECTIVE: Literal["selective"] = "selective"
aten = torch.ops.aten
# Matrix products, and which of their arguments is the left factor [T, I]. Those of experts are not kept: transformers
# adds biases to them in place.
PRODUCTS: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
VARLEN = "torch_attn::_varlen_attn"


def recompute_layers(model: PreTrainedModel, how: bool | Literal["selective"]) -> None:
    """Have a model's layers keep their input alone, and recompute the rest in the backward pass.

    Args:
        how: whether they do; if "selective", they also keep the results of attention and of matrix products that are
            no wider than their input: half of the operations, for a quarter of the memory without recomputation.
    """
    if not how:
        return
    selective = {"context_fn": partial(create_selective_checkpoint_contexts, _keeps)} if how == SELECTIVE else {}
    model.gradient_checkpointing_enable({"use_reentrant": False, **selective})


def _keeps(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    if operation in ATTENTION or operation.name() == VARLEN or _is_narrow(operation, arguments):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _is_narrow(operation: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether the operation is a product [T, I] × [I, O] with O ≤ I."""
    left = PRODUCTS.get(operation)
    return left is not None and arguments[left + 1].shape[-1] <= arguments[left].shape[-1]
