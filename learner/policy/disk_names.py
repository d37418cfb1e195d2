"""Weights by the names that they have in a model's files, which are those that vLLM loads.

Some weights have another form in transformers than in the files: a layer's experts are one tensor in transformers, and
three tensors per expert in the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from common.errors import UserError


class DiskNames:
    """Names and forms of a model's weights in its files.

    Raises:
        UserError: a weight in the files combines several of the model's weights, which are gathered one by one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._converted: set[str] = set()  # names of weights that have another form in the files
        taken: set[str] = set()
        for name, parameter in model.named_parameters():
            shape = getattr(parameter, "ds_shape", parameter.shape)  # under ZeRO 3 a parameter itself is empty
            parts = self._on_disk(name, torch.empty(shape, device="meta"))
            if sum(part.numel() for part in parts.values()) != shape.numel() or taken & parts.keys():
                raise UserError(
                    f"{type(model).__name__} cannot be trained: its files have no separate weights for {name}"
                )
            taken |= parts.keys()
            if parts.keys() != {name}:
                self._converted.add(name)

    def of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Convert whole weights, one by one, from the model's names and forms to those of its files."""
        for name, tensor in weights:
            if name in self._converted:
                yield from self._on_disk(name, tensor).items()
            else:
                yield name, tensor

    def _on_disk(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        parts: dict[str, torch.Tensor] = revert_weight_conversion(self._model, {name: tensor})
        return parts
