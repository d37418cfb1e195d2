"""Attention over packed sequences, exactly separated, without a [T, T] mask.

The packed tokens [1, H, T, D] are laid out as padded rows [R, H, L, D], where `is_causal` alone keeps the
sequences apart (padding comes after every real token), and the results are gathered back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from common.errors import UserError

PACKED_SDPA = "spo_packed_sdpa"


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences of like length, padded to one length L.

    Attributes:
        shape: (R, L).
        tokens: packed position of each cell, int64 [R * L]; padding points at a real token, whose result is unused.
    """

    shape: tuple[int, int]
    tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the sequences of one packed row [1, T] begin and end.

    Attributes:
        rows: the sequences as padded rows.
        cells: for each packed token its cell in the rows laid end to end, int64 [T].
        borders: cumulative lengths, int32 [B + 1].
        longest: tokens of the longest sequence.
    """

    rows: list[Rows]
    cells: torch.Tensor
    borders: torch.Tensor
    longest: int

    def flash_arguments(self) -> dict[str, Any]:
        """What transformers' flash-attention wants to know about packed sequences."""
        return {
            "cu_seq_lens_q": self.borders,
            "cu_seq_lens_k": self.borders,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


def segment(lengths: Sequence[int], device: torch.device | str = "cpu") -> Segments:
    """Lay out sequences of the given lengths, in packed order."""
    sizes = torch.tensor(lengths)
    borders = F.pad(sizes.cumsum(0), (1, 0))
    rows, cells, offset = [], torch.empty(int(borders[-1]), dtype=torch.int64), 0
    for group in _like_lengths(lengths):
        members = torch.tensor(group)
        length = int(sizes[members].max())
        column = torch.arange(length)
        inside = column < sizes[members, None]
        tokens = borders[members, None] + column.where(inside, torch.zeros(()).long())
        rows.append(Rows((len(group), length), tokens.flatten().to(device)))
        cells[tokens[inside]] = offset + torch.arange(inside.numel()).view_as(inside)[inside]
        offset += inside.numel()
    return Segments(rows, cells.to(device), borders.to(device, torch.int32), max(lengths))


def _like_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Indices grouped so that no row is padded to more than twice its length."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or lengths[groups[-1][0]] > 2 * lengths[index]:
            groups.append([])
        groups[-1].append(index)
    return [sorted(group) for group in groups]


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence; [1, H, T, D] in, [1, T, H, D] out.

    Raises:
        UserError: the model's attention has a part that this one lacks (soft-capping, sinks).
    """
    for name in ("softcap", "s_aux"):
        if others.get(name) is not None:
            raise UserError(f"learner.attention: this model's attention uses {name}, which packed sdpa lacks")
    tokens_QKV = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    outputs = []
    for group in segments.rows:
        q, k, v = (
            tensor.index_select(0, group.tokens).unflatten(0, group.shape).transpose(1, 2) for tensor in tokens_QKV
        )
        window = _window_mask(group.shape[1], sliding_window, q.device)
        output = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=window,
            dropout_p=dropout,
            is_causal=window is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    cells = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return cells.index_select(0, segments.cells)[None], None


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Causal mask [L, L] that sees `window` tokens back; None where plain causality says the same."""
    if window is None or length <= window:
        return None
    position = torch.arange(length, device=device)
    back = position[:, None] - position
    return (back >= 0) & (back < window)


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
