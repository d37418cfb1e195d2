"""vLLM's side of a weight update: each worker maps the shared memory file and loads its part of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from generator.weights.direct_load import DirectLoad, check_adapters
from generator.weights.mappings import Mappings
from generator.weights.shared_weights import tensors
from generator.weights.weight_names import check_names, is_tied

ADAPTER_PREFIX = "base_model.model."  # comes before the weights' names in an adapter


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
        lora_scaling: if set, the tensors are a LoRA adapter, multiplied by this and added to the weights on disk.
    """

    path: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    lora_scaling: float | None = None


class SharedMemoryWeightEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads weights in checkpoint format from a memory file, each worker its part.

    It loads straight into the model if it can (`direct_load`), else with vLLM's layerwise reloading, which undoes and
    redoes what vLLM did to the weights after it first loaded them (packing, quantization), layer by layer.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Check that the model can take updates; raises like `check_adapters`. Each update names its own file."""
        if self.vllm_config.lora_config is not None:
            check_adapters(self.model)

    @cached_property
    def _mappings(self) -> Mappings:
        return Mappings()

    def start_weight_update(self) -> None:
        """Make the model ready to be loaded as if for the first time."""
        self._direct = DirectLoad.of(self.model, self.model_config)
        if self._direct is not None:
            self._direct.prepare()
        else:
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all weights.

        Raises:
            ValueError: they are not all the weights of this model.
        """
        arrived = tensors(update_info, self._mappings.open(update_info.path))
        if update_info.lora_scaling is None:
            self.load(arrived, update_info.names)
            return
        names: list[str] = []
        self.load(self._merged(dict(arrived), update_info.lora_scaling, names), names)

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

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], names: Collection[str]) -> None:
        """Load tensors; `names`, which may grow with them, is complete once they are loaded."""
        load: Any = self.model.load_weights
        check_names(self.model, self.model_config, names, load(tensors))

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
        self._mappings.close()
