"""Serves the learner's newest weights: each version is copied once, into one block, and sent from the copy."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from common.config import WeightsConfig
from common.errors import UserError
from common.log import get_logger
from common.weights.delta import THREADS, encode_all, item_bytes, same_layout
from common.weights.listener import BindAddress
from common.weights.server import SnapshotServer
from common.weights.snapshot import Snapshot
from common.weights.wire import ALIGNMENT, Manifest, ScoredPrompt, checksum
from learner.host_copy import HostCopy, host_memory
from learner.nccl import Nccl, NcclError
from learner.nccl_groups import NcclGroups

FIRST_GUESS = 1 << 20  # bytes; only the first snapshots have to grow


class WeightServer:
    """Copies tensors and serves the copy; with the backend `nccl` it is sent from this process's GPU.

    Args:
        nccl: makes that backend's groups.

    Attributes:
        address, sent, endpoint: those of its `SnapshotServer`.

    Raises:
        UserError: see `SnapshotServer`; or the backend `nccl` without a GPU.
    """

    def __init__(self, config: WeightsConfig, *, log: Any = None, nccl: Callable[[], Nccl] | None = None) -> None:
        self._groups: NcclGroups | None = None
        if config.backend == "nccl":
            self._groups = NcclGroups((nccl or _nccl_of_this_gpu)(), log or get_logger())
        self._server = SnapshotServer(
            BindAddress(config.bind, config.advertise, config.curve_dir), config.credit, handler=self._groups, log=log
        )
        self.address, self.sent, self.endpoint = self._server.address, self._server.sent, self._server.endpoint
        self._chunk_bytes = config.chunk_mib << 20
        self._deltas = config.deltas != "off" and self._groups is None
        self._life = secrets.token_hex(8)
        self._published = 0
        self._last: Snapshot | None = None

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype | str,
        prompt: ScoredPrompt | None = None,
    ) -> None:
        """Copy the weights and serve them from now on; arguments as of `copy`."""
        self.serve(self.copy(version, tensors, dtype, prompt))

    def copy(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype | str,
        prompt: ScoredPrompt | None = None,
        device: torch.device | None = None,
    ) -> WeightCopy:
        """Copy the weights, which may change afterwards (on a GPU: after `WeightCopy.before_update`).

        The copy before must have been served.

        Args:
            version: weights after this many learner steps.
            tensors: (name, tensor) as `transformers` names them, each tied tensor once.
            dtype: what floating-point tensors are sent as.
            prompt: scored with these weights, for generators to check theirs by.
            device: where the tensors are; None: on the CPU.
        """
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        buffer = self._server.spare()
        if self._groups is not None and self._groups.reads(buffer):
            buffer = None
        name = f"{self._life}-{self._published}"
        self._published += 1
        return copy_weights(version, tensors, dtype, snapshot=name, buffer=buffer, prompt=prompt, device=device)

    def serve(self, copy: WeightCopy) -> None:
        """Serve a copy from now on; in any thread, as long as `copy` is not called meanwhile."""
        snapshot = copy.snapshot(self._chunk_bytes)
        if self._last is not None and self._deltas and self._server.deltas_wanted:
            snapshot = with_deltas(snapshot, self._last)
        self._server.serve(snapshot)
        self._last = snapshot

    def close(self) -> None:
        """Stop serving."""
        self._server.close()
        if self._groups is not None:
            self._groups.close()


def with_deltas(snapshot: Snapshot, base: Snapshot) -> Snapshot:
    """The same snapshot with a delta for each chunk; as it is, where the base has another layout."""
    if not same_layout(base.manifest, snapshot.manifest):
        return snapshot
    deltas = encode_all(snapshot.chunks, base.chunks, item_bytes(snapshot.manifest))
    return Snapshot(snapshot.manifest.model_copy(update={"base": base.name}), snapshot.chunks, snapshot.memory, deltas)


@dataclass
class WeightCopy:
    """A version's weights in memory of their own.

    Attributes:
        manifest: of the snapshot that it becomes, but for chunks and checksums.
        buffer: uint8; the first `total_bytes` of it are the weights.
    """

    manifest: dict[str, Any]
    buffer: torch.Tensor
    on_the_way: HostCopy

    def before_update(self) -> None:
        """To be called before the weights change; waits for nothing itself."""
        self.on_the_way.before_update()

    def snapshot(self, chunk_bytes: int) -> Snapshot:
        """A whole snapshot whose `memory` is the buffer; checksums are computed in several threads."""
        self.on_the_way.wait()
        end = self.manifest["total_bytes"]
        data = self.buffer.numpy().data[:end].toreadonly()
        chunks = [data[start : start + chunk_bytes] for start in range(0, end, chunk_bytes)]
        with ThreadPoolExecutor(THREADS, "checksums") as pool:
            checksums = list(pool.map(checksum, chunks))
        return Snapshot.whole(
            Manifest(**self.manifest, chunk_bytes=chunk_bytes, checksums=checksums), data, self.buffer
        )


def take_snapshot(
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    chunk_bytes: int,
    **options: Any,
) -> Snapshot:
    """A snapshot of the tensors, in chunks of `chunk_bytes`; the rest as of `copy_weights`."""
    return copy_weights(version, tensors, dtype, **options).snapshot(chunk_bytes)


def copy_weights(
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    *,
    snapshot: str | None = None,
    buffer: torch.Tensor | None = None,
    prompt: ScoredPrompt | None = None,
    device: torch.device | None = None,
) -> WeightCopy:
    """Copy the tensors, one after another as they come, so that a sharded model is gathered piecewise.

    Args:
        version: weights after this many learner steps.
        tensors: (name, tensor) as `transformers` names them; a tensor need not outlive its iteration.
        dtype: floating-point tensors are cast to it, others keep their type.
        snapshot: its name, as `common.weights.wire` tells; by default the first of a life of its own.
        buffer: uint8 memory to overwrite: that of a snapshot nobody reads any more. Writing to fresh memory
            takes several times as long.
        prompt, device: see `WeightServer.copy`.
    """
    buffer = host_memory(FIRST_GUESS) if buffer is None else buffer
    on_the_way = HostCopy(device or torch.device("cpu"))
    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[list[int]] = []
    offsets: list[int] = []
    end = 0
    for name, tensor in tensors:
        wire = dtype if tensor.is_floating_point() else tensor.dtype
        size = tensor.numel() * wire.itemsize
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if start + size > len(buffer):
            on_the_way.end()
            on_the_way.wait()
            buffer = _grown(buffer, end, start + size)
        buffer[end:start].zero_()
        on_the_way.add(buffer[start : start + size].view(wire).view(tensor.shape), tensor.detach())
        names.append(name)
        dtypes.append(str(wire).removeprefix("torch."))
        shapes.append(list(tensor.shape))
        offsets.append(start)
        end = start + size
    on_the_way.end()
    manifest: dict[str, Any] = {
        "snapshot": snapshot or f"{secrets.token_hex(8)}-0",
        "version": version,
        "total_bytes": end,
        "names": names,
        "dtypes": dtypes,
        "shapes": shapes,
        "offsets": offsets,
        "check_token_ids": prompt.token_ids if prompt else [],
        "check_logprobs": prompt.logprobs if prompt else [],
    }
    return WeightCopy(manifest, buffer, on_the_way)


def _grown(buffer: torch.Tensor, used: int, needed: int) -> torch.Tensor:
    """A larger buffer with the same first bytes; memory never written to costs nothing."""
    larger = host_memory(max(needed, 2 * len(buffer)))
    larger[:used] = buffer[:used]
    return larger


def _nccl_of_this_gpu() -> Nccl:
    if not torch.cuda.is_available():
        raise UserError("learner.weights.backend = 'nccl' needs a GPU, and torch sees none; set it to zmq")
    try:
        return Nccl(torch.device("cuda", torch.cuda.current_device()))
    except NcclError as error:
        raise UserError(f"learner.weights.backend = 'nccl': {error}; set it to zmq") from None
