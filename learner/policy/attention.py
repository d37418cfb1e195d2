"""Attention over packed sequences, exactly separated, without a [T, T] mask.

A GPU uses torch's variable-length attention, which takes the bounds of the sequences. Elsewhere the packed tokens
[1, H, T, D] are laid out as padded sequences [R, H, L, D], where `is_causal` alone keeps the sequences apart (padding
comes after every real token), and the results are gathered back. Sequences that begin with the same packed tokens
(`learner.batch.prefixes`) are laid out whole, each with these tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from common.errors import UserError
from learner.ranks.ulysses import SequenceGroup

varlen_attn: Any = None  # not every torch has it; `kernels.py` then does not choose it
with contextlib.suppress(ImportError):
    from torch.nn.attention import varlen

    varlen_attn = varlen.varlen_attn

PACKED_SDPA = "spo_packed_padded"  # transformers would refuse a name with "sdpa" for models with sinks
PACKED_VARLEN = "spo_packed_varlen"
MISSING_PARTS = ("softcap", "s_aux")  # parts of a model's attention that varlen lacks, and sdpa has
CHUNKED = "chunked_attention"  # transformers' type of layers in which a token sees only its own chunk
SINK_WIDTH = 8  # numbers that a sink adds to a head; kernels take multiples of 8
# Up to this length torch's kernel for CPUs is faster in float32 than in 16 bits, up to twice at 85 tokens.
FLOAT32_LENGTH = 512


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """Sequences of similar length, padded to one length L.

    Attributes:
        shape: (R, L).
        indices: packed position of each padded position, int64 [R * L]; padding points at a real token, and its own
            result is unused.
    """

    shape: tuple[int, int]
    indices: torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Where the sequences packed into one row [1, T] begin and end.

    Attributes:
        cu_seqlens: cumulative lengths, int32 [B + 1].
        max_seqlen: tokens of the longest sequence.
        padded: the same sequences as padded groups.
        unpad_indices: position of each packed token in the padded groups laid end to end, int64 [T].
        places: packed position of each token of the sequences laid end to end, int64 [cu_seqlens[-1]]; None if the
            sequences are packed end to end.
        first: first place of each packed token in that layout, int64 [T]; None if `places` is.
        group: ranks that hold a slice each of the packed tokens; if None, this rank holds all of them.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    padded: list[PaddedGroup]
    unpad_indices: torch.Tensor
    places: torch.Tensor | None = None
    first: torch.Tensor | None = None
    group: SequenceGroup | None = None

    @property
    def tokens_saved(self) -> int:
        """Tokens that are not computed again because they are in a common prefix."""
        return 0 if self.places is None else len(self.places) - len(self.unpad_indices)

    def divided(self, group: SequenceGroup, padding: int) -> PackedSequences:
        """The same sequences and one more of `padding` tokens, for packed tokens that a group's ranks divide."""
        if not padding:
            return replace(self, group=group)
        tokens, cells = len(self.unpad_indices), sum(len(one.indices) for one in self.padded)
        added = torch.arange(padding, device=self.unpad_indices.device)
        return PackedSequences(
            torch.cat([self.cu_seqlens, self.cu_seqlens[-1:] + padding]),
            max(self.max_seqlen, padding),
            [*self.padded, PaddedGroup((1, padding), tokens + added)],
            torch.cat([self.unpad_indices, cells + added]),
            group=group,
        )

    def flash_arguments(self) -> dict[str, Any]:
        """The sequences as transformers' flash attention takes them; raises `UserError` if they share packed tokens."""
        if self.places is not None:
            raise UserError("flash_attention_2 cannot read shared prefixes; set learner.attention to varlen or sdpa")
        return {
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen,
        }


def pack_sequences(
    lengths: Sequence[int], device: torch.device | str = "cpu", places: np.ndarray | None = None
) -> PackedSequences:
    """Lay out sequences of the given lengths [B], in packed order.

    Args:
        places: packed position of each of their tokens, if some share tokens; see `learner.batch.prefixes.PackedRows`.
    """
    seqlens = torch.tensor(lengths)
    cu_seqlens = F.pad(seqlens.cumsum(0), (1, 0))
    tokens = int(cu_seqlens[-1])
    place = torch.arange(tokens) if places is None else torch.from_numpy(places)
    padded, unpad_indices, offset = [], torch.empty(tokens, dtype=torch.int64), 0
    for group in _similar_lengths(lengths):
        members = torch.tensor(group)
        length = int(seqlens[members].max())
        position = torch.arange(length)
        is_token = position < seqlens[members, None]
        indices = cu_seqlens[members, None] + position.where(is_token, torch.zeros(()).long())
        padded.append(PaddedGroup((len(group), length), place[indices.flatten()].to(device)))
        unpad_indices[indices[is_token]] = offset + torch.arange(is_token.numel()).view_as(is_token)[is_token]
        offset += is_token.numel()
    bounds = cu_seqlens.to(device, torch.int32), max(lengths)
    if places is None:
        return PackedSequences(*bounds, padded, unpad_indices.to(device))
    # A shared token attends to the same tokens in all of its sequences, so its result is the same in all.
    first = torch.from_numpy(np.unique(places, return_index=True)[1])
    return PackedSequences(*bounds, padded, unpad_indices[first].to(device), place.to(device), first.to(device))


def _similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Indices grouped so that no sequence is padded to more than twice its length."""
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
    sequences: PackedSequences,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence; [1, H, T, D] in, [1, T, H, D] out.

    Args:
        s_aux: sinks [H]: scores, one a head, that take part in every softmax and bring no value.
        softcap: scores s become softcap * tanh(s / softcap); they are then in memory, [R, H, L, L].
    """
    attend = F.scaled_dot_product_attention if softcap is None else partial(_soft_capped, softcap)
    if s_aux is not None:
        scaling = scaling or query.shape[-1] ** -0.5
        s_aux = s_aux / scaling  # a sink is a finished score, and the kernel multiplies all scores by `scaling`
    tokens_QKV = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    outputs = []
    for group in sequences.padded:
        q, k, v = (repeated(tensor, group.indices).unflatten(0, group.shape).transpose(1, 2) for tensor in tokens_QKV)
        if q.device.type == "cpu" and q.dtype.itemsize < 4 and group.shape[1] <= FLOAT32_LENGTH:
            q, k, v = q.float(), k.float(), v.float()
        window = _window_mask(group.shape[1], sliding_window, _chunk(module), q.device)
        if s_aux is not None:
            q, k, v, window = _with_sinks(q, k, v, window, s_aux)
        output = attend(
            q,
            k,
            v,
            attn_mask=window,
            dropout_p=dropout,
            is_causal=window is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        if s_aux is not None:
            output = output[:, :, 1:, :-SINK_WIDTH]
        outputs.append(output.transpose(1, 2).flatten(0, 1).to(query.dtype))
    padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return padded.index_select(0, sequences.unpad_indices)[None], None


def _soft_capped(
    softcap: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """What `F.scaled_dot_product_attention` computes, with scores that are soft-capped before the softmax."""
    if enable_gqa:
        k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for heads in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    scores = torch.tanh(scores / softcap) * softcap
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return F.dropout(scores.softmax(-1, dtype=torch.float32), dropout_p).to(v.dtype) @ v


def _with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: torch.Tensor | None, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Put a token before each sequence that all of its tokens see: its score is the head's sink, its value 0.

    So queries [R, H, L, D], keys and values become [R, H, 1 + L, D + SINK_WIDTH], and causality alone still suffices.

    Args:
        sinks: divided by the scale of the scores [H].
    """
    token = (0, SINK_WIDTH, 1, 0)
    q = torch.cat([q, sinks.to(q.dtype)[:, None, None].expand(*q.shape[:-1], 1)], dim=-1)
    k, v = F.pad(k, token), F.pad(v, token)
    k[:, :, 0, -SINK_WIDTH] = 1.0  # times the query's added number, the sink: the score of the added token
    return (
        F.pad(q, (0, SINK_WIDTH - 1, 1, 0)),
        k,
        v,
        None if window is None else F.pad(window, (1, 0, 1, 0), value=True),
    )


def packed_varlen(
    attend: Callable[..., torch.Tensor],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sequences: PackedSequences,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence by one kernel; [1, H, T, D] in, [1, T, H, D] out.

    Args:
        attend: `torch.nn.attention.varlen.varlen_attn`, or another function of its signature.

    Raises:
        UserError: the model's attention has a part that the kernel lacks.
    """
    for part in MISSING_PARTS:
        if others.get(part) is not None:
            raise UserError(
                f"learner.attention: this model's attention uses {part}, which varlen lacks; set learner.attention=sdpa"
            )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if sequences.places is not None:
        q, k, v = (repeated(tensor, sequences.places) for tensor in (q, k, v))
    output = attend(
        q,
        k,
        v,
        sequences.cu_seqlens,
        sequences.cu_seqlens,
        sequences.max_seqlen,
        sequences.max_seqlen,
        scale=scaling,
        # Tokens that each token sees before and after itself: all before, or `sliding_window` including itself.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if sequences.first is not None:
        output = output.index_select(0, sequences.first)
    return output[None], None


class _Repeated(torch.autograd.Function):
    """See `repeated`."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(at)
        ctx.tokens = len(tokens)
        return tokens.index_select(0, at)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (at,) = ctx.saved_tensors
        total = grad.new_zeros((ctx.tokens, *grad.shape[1:]), dtype=torch.promote_types(grad.dtype, torch.float32))
        return total.index_add_(0, at, grad.to(total.dtype)).to(grad.dtype), None


def repeated(tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Tokens [T, …] taken at int64 [N], each any number of times; gradients are added up in float32."""
    taken: torch.Tensor = _Repeated.apply(tokens, at)  # type: ignore[no-untyped-call]
    return taken


def _window_mask(length: int, window: int | None, chunk: int | None, device: torch.device) -> torch.Tensor | None:
    """Causal mask [L, L] over the last `window` tokens, of the same `chunk`; None if plain causality is the same."""
    if length <= min(window or length, chunk or length):
        return None
    position = torch.arange(length, device=device)
    back = position[:, None] - position
    mask = (back >= 0) & (back < (window or length))
    return mask & (position[:, None] // chunk == position // chunk) if chunk else mask


def _chunk(module: torch.nn.Module) -> int | None:
    """The size in tokens of the chunks that the layer's attention is limited to; None if it sees all earlier tokens."""
    types = getattr(getattr(module, "config", None), "layer_types", None)
    if not types or types[module.layer_idx] != CHUNKED:
        return None
    return int(module.config.attention_chunk_size)  # type: ignore[union-attr, arg-type]


def across_ranks(
    attend: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sequences: PackedSequences,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`attend` to packed tokens, of which ranks may hold slices (`PackedSequences.group`)."""
    group = sequences.group
    if group is None:
        return attend(module, query, key, value, attention_mask, sequences=sequences, **options)  # type: ignore[no-any-return]
    query, key, value = group.all_tokens(query, key, value)
    if options.get("s_aux") is not None:
        # Only the sinks of the heads that this rank computes.
        options["s_aux"] = options["s_aux"].chunk(group.size)[group.rank]
    output, _ = attend(module, query, key, value, attention_mask, sequences=sequences, **options)
    return group.own_tokens(output), None
