"""Checks a snapshot that holds a LoRA adapter, and writes its files for vLLM to load."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from common.config import LoraConfig
from common.errors import UserError
from common.files import own_folder
from common.weights.memory import MemoryFile
from common.weights.wire import Manifest
from generator.weights.shared_weights import SharedWeights, tensors

A, B = ".lora_A.weight", ".lora_B.weight"  # suffixes of the names of an adapter's tensors


def check_adapter(manifest: Manifest, lora: LoraConfig) -> None:
    """Raise `UserError` unless a snapshot is a whole adapter with the rank that the engine was started for."""
    names = set(manifest.names)
    for name, shape in zip(manifest.names, manifest.shapes, strict=True):
        if len(shape) != 2 or not name.endswith((A, B)):
            raise UserError(
                f"version {manifest.version} of the weights has {name}, which is not part of an adapter, but this "
                "generator expects one (learner.lora): start all processes of a run with one configuration"
            )
        rank = shape[0] if name.endswith(A) else shape[1]
        if rank != lora.rank:
            raise UserError(
                f"version {manifest.version} of the weights is an adapter of rank {rank}, but this generator was "
                f"started with learner.lora.rank = {lora.rank}: start all processes of a run with one configuration"
            )
        layer = name.removesuffix(A).removesuffix(B)
        if not {layer + A, layer + B} <= names:
            raise UserError(f"version {manifest.version} of the weights has one of the two matrices of {layer} alone")


class AdapterFolder:
    """An adapter as a folder that vLLM reads; its tensors are in memory that is freed however this process ends.

    Raises:
        OSError: not enough memory or disk space.
    """

    def __init__(self, weights: SharedWeights, lora: LoraConfig) -> None:
        import torch
        from safetensors.torch import save

        manifest = weights.manifest
        data = torch.frombuffer(bytearray(weights.view(0, manifest.total_bytes)), dtype=torch.uint8)
        packed = save(dict(tensors(manifest, data)))
        layers = {name.removesuffix(A).removesuffix(B) for name in manifest.names}
        settings = {
            "peft_type": "LORA",
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
            "bias": "none",
        }
        self.version = manifest.version
        self._file = MemoryFile(len(packed))
        self._file.write(0, packed)
        self.path = Path(tempfile.mkdtemp(prefix="adapter-", dir=own_folder()))
        (self.path / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        (self.path / "adapter_model.safetensors").symlink_to(self._file.path)

    def close(self) -> None:
        """Remove the folder; may be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._file.close()
