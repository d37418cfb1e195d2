"""Weights by the names that they have in a model's files, which are those that vLLM loads.

Some weights have another form in transformers than in the files: a layer's experts are one tensor in transformers, and
three tensors per expert in the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from common.errors import UserError
from learner.policy.lora import PREFIX, layer_and_part, without_adapter


class DiskNames:
    """Names and forms of a model's weights in its files.

    Raises:
        UserError: a weight in the files combines several of the model's weights, which are gathered one by one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._converted: set[str] = set()  # names of weights that have another form in the files
        self._layers: dict[str, str] = {}  # names of layers, each with the one that it has in the files
        taken: set[str] = set()
        for name, parameter in model.named_parameters():
            shape = getattr(parameter, "ds_shape", parameter.shape)  # under ZeRO 3 a parameter itself is empty
            plain = without_adapter(name)
            parts = self._on_disk(plain, torch.empty(shape, device="meta"))
            if sum(part.numel() for part in parts.values()) != shape.numel() or taken & parts.keys():
                raise UserError(
                    f"{type(model).__name__} cannot be trained: its files have no separate weights for {name}"
                )
            taken |= parts.keys()
            if parts.keys() != {plain}:
                self._converted.add(plain)
                self._layers[plain.rpartition(".")[0]] = next(iter(parts)).rpartition(".")[0]

    def of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Convert whole weights, one by one, from the model's names and forms to those of its files."""
        for name, tensor in weights:
            if name in self._converted:
                yield from self._on_disk(name, tensor).items()
            else:
                yield name, tensor

    def of_adapter(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name an adapter's tensors, which `adapter_weights` has named, as the files name the layers."""
        for name, tensor in weights:
            layer, part = layer_and_part(self._model, name)
            yield f"{PREFIX}{self._layers.get(layer, layer)}.{part}", tensor

    def _on_disk(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        parts: dict[str, torch.Tensor] = revert_weight_conversion(self._model, {name: tensor})
        return parts


def rename_as_stored(model: PreTrainedModel, renamed: dict[str, str]) -> None:
    """Name the weights of a model that was made without its files as loading with `key_mapping=renamed` would."""
    if renamed:
        conversions = get_model_conversion_mapping(model, renamed, add_legacy=False)
        # What PrefixChange removes is in `renamed`.
        stored: Any = [part for part in conversions if not isinstance(part, PrefixChange)]
        model._weight_conversions = stored


def untrained(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """The weights in the files that are not the model's parameters: the model's name of each by the file's name."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model)
    renamings = [part for part in conversions if isinstance(part, WeightRenaming)]
    converters = [part for part in conversions if isinstance(part, WeightConverter)]
    # A tied parameter has two names.
    parameters = {
        without_adapter(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)
    }

    prefix = model.base_model_prefix
    names = {name: rename_source_key(name, renamings, converters, prefix, parameters)[0] for name in stored}
    return {name: own for name, own in names.items() if own not in parameters}
