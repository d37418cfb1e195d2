"""An immutable copy of the weights of one version, in one block of host memory."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import torch

from common.weights.snapshot import Snapshot
from common.weights.wire import ALIGNMENT, Manifest, checksum

FIRST_GUESS = 1 << 20  # bytes; only the first snapshots have to grow


def take_snapshot(
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    chunk_bytes: int,
    *,
    snapshot: str | None = None,
    buffer: torch.Tensor | None = None,
) -> Snapshot:
    """Copy the tensors, one after another as they come, so that a sharded model is gathered piecewise.

    Args:
        version: weights after this many learner steps.
        tensors: (name, tensor) as `transformers` names them; a tensor need not outlive its iteration.
        dtype: floating-point tensors are cast to it, others keep their type.
        chunk_bytes: size of all chunks but the last.
        snapshot: its name, as `common.weights.wire` tells; by default the first of a life of its own.
        buffer: uint8 memory to overwrite: that of a snapshot nobody reads any more. Writing to fresh memory
            takes several times as long.

    Returns:
        A whole snapshot whose `memory` is such a buffer.
    """
    buffer = torch.empty(FIRST_GUESS, dtype=torch.uint8) if buffer is None else buffer
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
            buffer = _grown(buffer, end, start + size)
        buffer[end:start].zero_()
        buffer[start : start + size].view(wire).view(tensor.shape).copy_(tensor.detach())
        names.append(name)
        dtypes.append(str(wire).removeprefix("torch."))
        shapes.append(list(tensor.shape))
        offsets.append(start)
        end = start + size
    data = buffer.numpy().data[:end].toreadonly()
    manifest = Manifest(
        snapshot=snapshot or f"{secrets.token_hex(8)}-0",
        version=version,
        total_bytes=end,
        chunk_bytes=chunk_bytes,
        checksums=[checksum(data[start : start + chunk_bytes]) for start in range(0, end, chunk_bytes)],
        names=names,
        dtypes=dtypes,
        shapes=shapes,
        offsets=offsets,
    )
    return Snapshot.whole(manifest, data, buffer)


def _grown(buffer: torch.Tensor, used: int, needed: int) -> torch.Tensor:
    """A larger buffer with the same first bytes; memory never written to costs nothing."""
    larger = torch.empty(max(needed, 2 * len(buffer)), dtype=torch.uint8)
    larger[:used] = buffer[:used]
    return larger
