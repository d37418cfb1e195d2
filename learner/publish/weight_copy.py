"""Copies a version's weights, all of them or one rank's share, and computes the checksums of the copied chunks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from common.weights.memory import Snapshot
from common.weights.wire import ALIGNMENT, Manifest, checksum
from learner.publish.host_copy import HostCopy, HostMemory

FIRST_GUESS = 1 << 20  # bytes; only the first snapshots have to grow
THREADS = max(1, min(8, os.cpu_count() or 1))  # for checksums; each computes about 10 GB/s


class ScoredPrompt(NamedTuple):
    """A prompt [T] and the log-probs of all its tokens but the first, each given the tokens before it [T - 1]."""

    token_ids: list[int]
    logprobs: list[float]


class Checksums:
    """Computes the checksums of a copy's chunks in threads.

    On a GPU it begins with each chunk as soon as that is copied. On a CPU it begins after the whole copy: training
    waits for the copy, which would share the cores with the checksums.

    Args:
        share: bytes that are copied, in whole chunks; None means all.
    """

    def __init__(self, chunk_bytes: int, copy: HostCopy, share: range | None) -> None:
        self.chunk_bytes = chunk_bytes
        self._copy, self._share = copy, share
        self._pool = ThreadPoolExecutor(THREADS, "checksums")
        self._next = 0 if share is None else share.start // chunk_bytes
        self._sums: dict[int, Future[int]] = {}

    def advance(self, memory: HostMemory, end: int, is_last: bool = False) -> None:
        """Note that everything before `end` was added to the copy, and with `is_last` that nothing follows."""
        if not (is_last or self._copy.is_beside):
            return
        if self._share is not None:
            end = min(end, self._share.stop)
        copied: Callable[[], None] | None = None
        while self._next * self.chunk_bytes < end:
            start = self._next * self.chunk_bytes
            stop = start + self.chunk_bytes
            if stop > end and not is_last:
                return
            copied = copied or self._copy.mark()
            self._sums[self._next] = self._pool.submit(_checksum, memory.file.view(start, min(stop, end)), copied)
            self._next += 1
        if is_last:
            self._pool.shutdown(wait=False)

    def result(self) -> dict[int, int]:
        """The checksums by chunk; waits until all are computed, and so until this rank's share is copied."""
        return {chunk: computed.result() for chunk, computed in self._sums.items()}


@dataclass
class WeightCopy:
    """A version's weights in memory of their own.

    Attributes:
        manifest: the snapshot's, without chunks and checksums.
        memory: begins with the weights; None if this rank copies nothing.
        on_the_way: its `before_update` must be called before the weights change.
        largest: largest absolute value of the weights; NaN if any weight is NaN, float32 [].
    """

    manifest: dict[str, Any]
    memory: HostMemory | None
    on_the_way: HostCopy
    sums: Checksums
    largest: torch.Tensor

    def snapshot(self, checksums: Mapping[int, int] | None = None) -> Snapshot:
        """A whole snapshot in this memory, with the checksums of all chunks; by default all were copied here."""
        assert self.memory is not None
        checksums = self.sums.result() if checksums is None else checksums
        manifest = Manifest(
            **self.manifest,
            chunk_bytes=self.sums.chunk_bytes,
            checksums=[checksums[chunk] for chunk in range(len(checksums))],
        )
        return Snapshot.whole(manifest, self.memory.file, self.memory)


def copy_weights(
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    chunk_bytes: int,
    *,
    snapshot: str | None = None,
    memory: HostMemory | None = None,
    prompt: ScoredPrompt | None = None,
    device: torch.device | None = None,
    share: range | None = None,
) -> WeightCopy:
    """Copy the tensors, one after another as they come, so that a sharded model is gathered piecewise.

    Args:
        tensors: (name, tensor) as `transformers` names them; a tensor need not outlive its iteration.
        dtype: floating-point tensors are cast to it, others keep their type.
        snapshot: its name (`common.weights.wire`); by default a random one.
        memory: of a snapshot that is no longer read, to overwrite: writing to fresh memory takes several times as long.
        device: where the tensors are; None means the CPU.
        share: bytes that this rank copies, in whole chunks; if None, it copies all, and the memory grows as needed.
    """
    if memory is None and share is None:
        memory = HostMemory(FIRST_GUESS, is_pinned=False)  # not pinned: it may grow larger than needed
    on_the_way = HostCopy(device or torch.device("cpu"))
    sums = Checksums(chunk_bytes, on_the_way, share)
    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[list[int]] = []
    offsets: list[int] = []
    end = 0
    largest = torch.zeros((), device=device)
    for name, tensor in tensors:
        wire = dtype if tensor.is_floating_point() else tensor.dtype
        if tensor.is_floating_point() and tensor.numel():
            low, high = tensor.detach().aminmax()
            largest = largest.maximum(high.maximum(-low).float())
        start = -(-end // ALIGNMENT) * ALIGNMENT
        before, end = end, start + tensor.numel() * wire.itemsize
        if memory is not None:
            if share is None and end > memory.file.size:
                on_the_way.mark()()
                memory = _grown(memory, before, end)
            for gap in _overlaps(range(before, start), share):
                memory.data[gap.start : gap.stop].zero_()
            for part in _overlaps(range(start, end), share):
                target = memory.data[part.start : part.stop].view(wire)
                source = tensor.detach()
                if len(part) < end - start:
                    source = source.reshape(-1)[(part.start - start) // wire.itemsize :][: len(target)]
                on_the_way.add(target.view(source.shape), source)
            sums.advance(memory, end)
        names.append(name)
        dtypes.append(str(wire).removeprefix("torch."))
        shapes.append(list(tensor.shape))
        offsets.append(start)
    if memory is not None:
        sums.advance(memory, end, is_last=True)
    manifest = {
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
    return WeightCopy(manifest, memory, on_the_way, sums, largest)


def _checksum(data: memoryview, copied: Callable[[], None]) -> int:
    copied()
    return checksum(data)


def _overlaps(part: range, share: range | None) -> Iterable[range]:
    """The part of a range that is in the share, if any is."""
    if share is not None:
        part = range(max(part.start, share.start), min(part.stop, share.stop))
    if len(part):
        yield part


def _grown(memory: HostMemory, used: int, needed: int) -> HostMemory:
    """Larger memory with the same first bytes; pages that are never written to take no memory."""
    larger = HostMemory(max(needed, 2 * memory.file.size), is_pinned=False)
    larger.data[:used] = memory.data[:used]
    return larger
