"""Separates packed sequences in the layers of any model that mix tokens.

Attention that transformers dispatches is replaced by one that knows the bounds of the sequences
(`learner.policy.attention`). Other layers that mix tokens, such as linear attention, Mamba and short convolutions, keep
a state from token to token. Their own forward runs on padded rows, one sequence each: padding follows the tokens, so a
causal layer never sees it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from common.config import LearnerConfig
from common.errors import UserError
from common.model_files import listed
from learner.policy.attention import (
    PACKED_SDPA,
    PACKED_VARLEN,
    PackedSequences,
    PaddedGroup,
    across_ranks,
    packed_sdpa,
    packed_varlen,
    repeated,
    varlen_attn,
)

# Names under which transformers' layers take what earlier tokens leave to later ones.
CACHES = {"cache_params", "past_key_values", "past_key_value", "layer_past", "state", "cache"}
INDEXER = "Indexer"  # ends the names of classes that choose the tokens which an attention reads


class Packing:
    """Where the sequences that a model's layers read at the moment begin and end.

    All modules of the model have it as their attribute `packing`, since not every model hands keyword arguments down to
    its layers. It keeps its value after a forward pass, because gradient checkpointing computes layers again.

    Attributes:
        sequences: the packed sequences; None while the model computes rows as transformers does.
        in_rows: whether a layer is computed on padded rows at the moment.
        in_step: whether all ranks call such a layer equally often, as ZeRO 3 needs: each call gathers its parameters.
        states: names of the layers that are computed on padded rows.
        indexers: names of the layers that choose the tokens which an attention reads; choosing has no gradient.
    """

    sequences: PackedSequences | None = None
    in_rows = False
    in_step = False
    _groups: tuple[PackedSequences, list[PaddedGroup]] | None = None

    def __init__(self, model: nn.Module) -> None:
        """Attach to a model; its layers with a state compute rows from now on."""
        self.states = []
        for name, layer, attends in list(layers_with_state(model)):
            layer.forward = partial(self._in_rows, layer.forward, inspect.signature(layer.forward), attends)
            self.states.append(name)
        self.indexers = []
        for name, module in model.named_modules():
            module.packing = self  # type: ignore[assignment]
            if type(module).__name__.endswith(INDEXER):
                module.requires_grad_(False)
                self.indexers.append(name)

    def _in_rows(
        self,
        forward: Callable[..., Any],
        signature: inspect.Signature,
        attends: bool,
        *arguments: Any,
        **named: Any,
    ) -> Any:
        """Compute a layer on padded rows [R, L, …] of its packed arguments [1, T, …]; its results are packed again."""
        sequences = self.sequences
        if sequences is None:
            return forward(*arguments, **named)
        tokens = len(sequences.unpad_indices)
        results = []
        self.in_rows = True
        try:
            for group in self._groups_of(sequences):
                call = signature.bind(*arguments, **named)
                for name, value in call.arguments.items():
                    call.arguments[name] = _laid_out(value, group, tokens)
                if "attention_mask" in signature.parameters:
                    call.arguments["attention_mask"] = (
                        _causal(group, sequences.unpad_indices.device) if attends else None
                    )
                results.append(forward(*call.args, **call.kwargs))
        finally:
            self.in_rows = False
        return _packed(results, sequences)

    def _groups_of(self, sequences: PackedSequences) -> list[PaddedGroup]:
        """The padded groups, followed by groups of one token up to the largest number of groups on any rank.

        The results of these added groups are not gathered back, and so have no gradient.
        """
        if not (self.in_step and torch.distributed.is_initialized()):
            return sequences.padded
        if self._groups is None or self._groups[0] is not sequences:
            most = torch.tensor(len(sequences.padded), device=sequences.unpad_indices.device)
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
            one = PaddedGroup((1, 1), sequences.unpad_indices.new_zeros(1))
            self._groups = sequences, [*sequences.padded, *[one] * (int(most) - len(sequences.padded))]
        return self._groups[1]


def layers_with_state(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """The layers that mix tokens other than by an attention that transformers dispatches.

    A layer that mixes tokens takes a cache. The innermost such modules are attention, which looks its implementation
    up, and layers with a state. If attention has such a layer inside it (an indexer, a convolution of its keys), the
    whole attention is one.

    Yields:
        Name, layer, and whether it is an attention, which needs a causal mask.
    """
    mixers = {name: module for name, module in model.named_modules() if _takes_cache(module)}
    for name, module in mixers.items():
        has_mixers_inside = any(other.startswith(f"{name}.") for other in mixers)
        is_inside_attention = any(name.startswith(f"{other}.") and _dispatches(mixers[other]) for other in mixers)
        if _dispatches(module):
            if has_mixers_inside:
                yield name, module, True
        elif not has_mixers_inside and not is_inside_attention:
            yield name, module, False


def attentions(model: nn.Module) -> list[nn.Module]:
    """The layers whose attention transformers dispatches."""
    return [module for module in model.modules() if _takes_cache(module) and _dispatches(module)]


def _takes_cache(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.keys()
    is_block = isinstance(module, GradientCheckpointingLayer)  # of a mixer and a feed-forward layer, or of one of them
    return bool(CACHES & parameters) and "input_ids" not in parameters and not is_block


def _dispatches(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _laid_out(value: Any, group: PaddedGroup, tokens: int) -> Any:
    """Every packed tensor [1, T, …] in an argument as rows [R, L, …]; what is not packed stays."""
    if isinstance(value, torch.Tensor):
        if value.ndim < 2 or value.shape[:2] != (1, tokens):
            return value
        return repeated(value[0], group.indices).unflatten(0, group.shape)
    if type(value) in (tuple, list):
        return type(value)(_laid_out(one, group, tokens) for one in value)
    if type(value) is dict:
        return {name: _laid_out(one, group, tokens) for name, one in value.items()}
    return value


def _packed(results: list[Any], sequences: PackedSequences) -> Any:
    """The results [R, L, …] of all padded groups as packed tensors [1, T, …]; None for what has no such shape."""
    first = results[0]
    if isinstance(first, (tuple, list)):
        return type(first)(_packed(list(parts), sequences) for parts in zip(*results, strict=True))
    if not isinstance(first, torch.Tensor) or first.shape[:2] != sequences.padded[0].shape:
        return None
    # In short rows an indexer chooses all tokens, which are fewer than it chooses in long ones. Fill up with index 0,
    # chosen already.
    width = max(result.shape[-1] for result in results)
    rows = [F.pad(result, (0, width - result.shape[-1])).flatten(0, 1) for result in results]
    return torch.cat(rows).index_select(0, sequences.unpad_indices)[None]


def _causal(group: PaddedGroup, device: torch.device) -> torch.Tensor:
    """Which tokens each token of a row sees, bool [R, 1, L, L]."""
    rows, length = group.shape
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().expand(rows, 1, -1, -1)


def _of_packing(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Attention of a model's layer, whose `packing` says where the sequences are."""

    @wraps(attend)
    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **named: Any,
    ) -> tuple[torch.Tensor, None]:
        packing = module.packing
        if packing.in_rows:
            return _attention_in_rows(query, key, value, mask, **named), None
        return across_ranks(attend, module, query, key, value, mask, sequences=packing.sequences, **named)

    return attention


def _attention_in_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    indices: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """Attention over padded rows; [R, H, L, D] in, [R, L, H, D] out.

    Args:
        mask: tokens that each token sees, bool [R, 1, L, L].
        indices: tokens that an indexer chose for each token [R, L, topk]; those it does not see count for nothing.
    """
    if indices is not None and mask is not None:
        chosen = torch.zeros_like(mask[:, 0]).contiguous().scatter(-1, indices.long(), True)
        mask = mask & chosen[:, None]
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2)


def check_division(packing: Packing, config: LearnerConfig, key: str, path: str) -> None:
    """Raise `UserError` if ranks are to divide the sequences of a model whose layers pass a state along them."""
    if config.sequence_parallel > 1 and packing.states:
        raise UserError(
            f"learner.sequence_parallel = {config.sequence_parallel}: {key} = {path!r} has layers with a state "
            f"({listed(packing.states)}), which need sequences whole; set it to 1"
        )


AttentionInterface.register(PACKED_SDPA, _of_packing(packed_sdpa))
AttentionInterface.register(PACKED_VARLEN, _of_packing(partial(packed_varlen, varlen_attn)))
