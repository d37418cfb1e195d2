"""Serves the learner's newest weights: each version is copied once, into one block, and sent from the copy."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from common.config import WeightsConfig
from common.weights.delta import encode_all, item_bytes, same_layout
from common.weights.memory import Snapshot
from common.weights.server import SnapshotServer
from common.weights.wire import CHUNK_BYTES
from learner.publish.host_copy import HostMemory
from learner.publish.weight_copy import ScoredPrompt, WeightCopy, copy_weights


class WeightServer:
    """Copies tensors, and serves the copy by a `SnapshotServer`, whose `UserError` it raises."""

    def __init__(self, config: WeightsConfig, *, log: Any = None) -> None:
        self._server = SnapshotServer(config, log=log)
        self.address, self.sent, self.endpoint = self._server.address, self._server.sent, self._server.endpoint
        self._deltas = config.deltas != "off"
        self._life = secrets.token_hex(8)
        self._published = 0
        self._last: Snapshot | None = None

    def copy(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype | str,
        prompt: ScoredPrompt | None = None,
        **options: Any,
    ) -> WeightCopy:
        """Copy the weights, which may change afterwards (on a GPU: after `HostCopy.before_update`).

        The previous copy must have been served.

        Args:
            tensors: (name, tensor) as `transformers` names them, each tied tensor once.
            prompt: scored with these weights; generators check theirs with it.
            options: other arguments of `copy_weights`; `memory` is by default that of `self.memory()`.
        """
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        if "memory" not in options:
            options["memory"] = self.memory()
        name = f"{self._life}-{self._published}"
        self._published += 1
        return copy_weights(version, tensors, dtype, CHUNK_BYTES, snapshot=name, prompt=prompt, **options)

    def memory(self) -> HostMemory | None:
        """Memory for the next copy, of its size; None for the first copy, whose size is not known."""
        spare = self._server.spare()
        memory: HostMemory | None = None if spare is None else spare.memory
        if self._last is None:
            return memory
        # The first version's size was not known: its memory is dropped if it grew larger than needed.
        size = self._last.manifest.total_bytes
        return memory if memory is not None and memory.file.size == size else HostMemory(size)

    def serve(self, copy: WeightCopy, checksums: Mapping[int, int] | None = None) -> None:
        """Serve a copy, in any thread while `copy` is not called; with `checksums` if other ranks copied a part."""
        snapshot = copy.snapshot(checksums)
        if self._last is not None and self._deltas and self._server.deltas_wanted:
            snapshot = with_deltas(snapshot, self._last)
        self._server.serve(snapshot)
        self._last = snapshot

    def close(self) -> None:
        self._server.close()


def with_deltas(snapshot: Snapshot, base: Snapshot) -> Snapshot:
    """The same snapshot with a delta for each chunk; unchanged if the base has another layout."""
    if not same_layout(base.manifest, snapshot.manifest):
        return snapshot
    deltas = encode_all(snapshot.chunks, base.chunks, item_bytes(snapshot.manifest))
    manifest = snapshot.manifest.model_copy(update={"base": base.name})
    return Snapshot(manifest, snapshot.chunks, snapshot.file, deltas, snapshot.memory)
