"""Attention as torch and transformers document it, on any device."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn


def tensors_of(lengths: list[int]) -> list[torch.Tensor]:
    """Queries of 4 heads, keys and values of 2, 8 wide, [1, H, T, 8] each."""
    torch.manual_seed(0)
    return [torch.randn(1, heads, sum(lengths), 8, dtype=torch.float64) for heads in (4, 2, 2)]


def varlen_reference(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`varlen_attn` as torch documents it: each sequence alone, with an explicit mask; on any device."""
    call = inspect.signature(varlen_attn).bind(*args, **kwargs)
    call.apply_defaults()
    a = SimpleNamespace(**call.arguments)
    assert a.cu_seq_q.dtype == a.cu_seq_k.dtype == torch.int32
    assert (a.max_q, a.max_k) == (a.cu_seq_q.diff().max(), a.cu_seq_k.diff().max())
    assert a.query.stride(-1) == a.key.stride(-1) == a.value.stride(-1) == 1
    assert a.enable_gqa or a.query.shape[1] == a.key.shape[1]
    before, after = a.window_size
    outputs = []
    for start, end in zip(a.cu_seq_q[:-1].tolist(), a.cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (a.query, a.key, a.value))
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)
        mask = (back <= before if before >= 0 else True) & ((-back <= after) if after >= 0 else back == back)
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=a.scale, enable_gqa=a.enable_gqa)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)
