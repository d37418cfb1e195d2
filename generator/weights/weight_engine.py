"""vLLM's side of a weight update: how each worker loads its part, here of a shared memory file that all of them map."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    TInitInfo,
    TUpdateInfo,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from generator.weights.direct_load import DirectLoad
from generator.weights.mappings import Mappings
from generator.weights.weight_names import check_names, is_tied

ADAPTER_PREFIX = "base_model.model."  # of names in an adapter, before those of the model's weights


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing is needed before the first update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the weights lie and what they are, column by column ([N] each).

    Attributes:
        path: file with all tensors, readable for as long as `update_weights` runs.
        names: as the model's checkpoint names them.
        dtypes: torch type names.
        shapes: full shapes; a worker takes its shard.
        offsets: bytes from the start of the file, aligned for the dtype.
        lora_scaling: the tensors are a LoRA adapter, which is added to the weights on disk multiplied with this.
    """

    path: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    lora_scaling: float | None = None


class CheckpointWeightEngine(WeightTransferEngine[TInitInfo, TUpdateInfo]):
    """Loads weights in checkpoint format, each worker its part.

    Straight into the model where that can be done (`direct_load`), else under vLLM's layerwise reloading, which undoes
    and redoes what vLLM did to the weights after it first loaded them (packing, quantization), layer by layer.
    """

    def start_weight_update(self) -> None:
        """Make the model ready to be loaded as if for the first time."""
        self._direct = DirectLoad.of(self.model, self.model_config)
        if self._direct is not None:
            self._direct.prepare()
        else:
            initialize_layerwise_reload(self.model)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], names: Collection[str]) -> None:
        """Load all weights; `names` are those of the tensors.

        Raises:
            ValueError: they are not all the weights of this model.
        """
        load: Any = self.model.load_weights
        check_names(self.model, self.model_config, names, load(tensors))

    def finish_weight_update(self) -> None:
        """Put the loaded weights where the kernels read them."""
        if self._direct is not None:
            self._direct.finish()
            return
        finalize_layerwise_reload(self.model, self.model_config)
        # An output layer tied to the embedding is never loaded itself; on a CPU it would keep its packed copy of the
        # old weights.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and is_tied(module, self.model, self.model_config):
                module.quant_method.process_weights_after_loading(module)


class SharedMemoryWeightEngine(CheckpointWeightEngine[InitInfo, UpdateInfo]):
    """Loads weights from a memory file."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect: each update names its file."""

    @cached_property
    def _mappings(self) -> Mappings:
        return Mappings()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all weights; raises like `load`."""
        tensors = _tensors(update_info, self._mappings.open(update_info.path))
        if update_info.lora_scaling is None:
            self.load(tensors, update_info.names)
            return
        names: list[str] = []
        self.load(self._merged(dict(tensors), update_info.lora_scaling, names), names)

    def _merged(
        self, adapter: dict[str, torch.Tensor], scaling: float, names: list[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights on disk with an adapter added: W + scaling B A in float32, rounded once; `names` grows with them.

        Raises:
            ValueError: a part of the adapter belongs to no weight of the model.
        """
        loader: Any = get_model_loader(self.vllm_config.load_config)
        for name, weight in loader.get_all_weights(self.model_config, self.model):
            layer = ADAPTER_PREFIX + name.removesuffix(".weight")
            a, b = (adapter.pop(f"{layer}.lora_{part}.weight", None) for part in "AB")
            if a is not None and b is not None:
                a, b = a.to(self.device).float(), b.to(self.device).float()
                weight = (weight.to(self.device).float() + scaling * (b @ a)).to(self.model_config.dtype)
            names.append(name)
            yield name, weight
        if adapter:
            raise ValueError(
                f"the model has no weight for {len(adapter)} parts of the adapter, among them {min(adapter)}"
            )

    def shutdown(self) -> None:
        """Give the mappings up."""
        self._mappings.close()


def _tensors(info: UpdateInfo, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a file's bytes, without a copy."""
    for name, dtype, shape, offset in zip(info.names, info.dtypes, info.shapes, info.offsets, strict=True):
        kind = getattr(torch, dtype)
        end = offset + math.prod(shape) * kind.itemsize
        yield name, data[offset:end].view(kind).view(shape)
