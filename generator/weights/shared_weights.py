"""Weights in shared memory: written once by the transfer, mapped by every engine process."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from common.weights.connection import Connection
from common.weights.pull import ChunkPuller, TransferStats
from common.weights.wire import Buffer, Manifest


class MemoryFile:
    """An anonymous memory file.

    It has no name in any file system: the kernel frees it with the last process that holds it, however
    that process ends. Other processes of this user open it at `path` while this one lives.

    Raises:
        OSError: not enough memory.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._file = os.memfd_create("spo-weights")
        try:
            # An empty model has nothing to map, and mmap refuses length 0.
            os.ftruncate(self._file, max(size, 1))
            self._map = mmap.mmap(self._file, max(size, 1))
        except BaseException:
            os.close(self._file)
            raise
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._bytes: np.ndarray | None = np.frombuffer(self._map, np.uint8)

    def write(self, start: int, data: Buffer) -> None:
        """Put bytes in their place."""
        assert self._bytes is not None
        # Unlike a slice assignment of memoryviews, this lets other threads run meanwhile.
        np.copyto(self._bytes[start : start + len(data)], np.frombuffer(data, np.uint8))

    def close(self) -> None:
        """Give the memory back; may be called again."""
        if self._bytes is not None:
            self._bytes = None
            self._map.close()
            os.close(self._file)


class MemoryPool:
    """Keeps the memory of the last transfer for the next: writing to fresh memory takes ten times as long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: MemoryFile | None = None
        self._open = True

    def take(self, size: int) -> MemoryFile:
        """A file of `size` bytes, with whatever it holds."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None and spare.size == size:
            return spare
        if spare is not None:
            spare.close()
        return MemoryFile(size)

    def give_back(self, file: MemoryFile) -> None:
        """Keep a file that nobody reads any more, or close it if there is one already."""
        with self._lock:
            if self._open and self._spare is None:
                self._spare = file
                return
        file.close()

    def close(self) -> None:
        """Give all memory back, that of files still in use as soon as they are given back."""
        with self._lock:
            self._open = False
            if self._spare is not None:
                self._spare.close()
                self._spare = None


class SharedWeights(AbstractContextManager[Any]):
    """One snapshot in a memory file.

    Attributes:
        version: weight version.
        seconds: how long the transfer took.
        timeout: None: nothing is waited for, they are there.
    """

    timeout: float | None = None

    def __init__(self, manifest: Manifest, file: MemoryFile, give_back: Callable[[MemoryFile], None]) -> None:
        self.manifest = manifest
        self.version = manifest.version
        self.seconds = 0.0
        self.path = file.path
        self._file: MemoryFile | None = file
        self._give_back = give_back

    def write(self, start: int, data: Buffer) -> None:
        """Put bytes of the snapshot in their place."""
        assert self._file is not None
        self._file.write(start, data)

    def update_info(self) -> dict[str, Any]:
        """What vLLM's workers need to load the weights (see `weight_engine.UpdateInfo`)."""
        manifest = self.manifest
        return {
            "path": self.path,
            "names": manifest.names,
            "dtypes": manifest.dtypes,
            "shapes": manifest.shapes,
            "offsets": manifest.offsets,
        }

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The weights are loaded everywhere, or not wanted; may be called again."""
        if self._file is not None:
            file, self._file = self._file, None
            self._give_back(file)


class SharedMemoryBackend:
    """Pulls each snapshot into shared memory; a `Backend` of `WeightClient`.

    Args:
        deliver: gets each snapshot when it is whole.
        credit: chunks that are asked for ahead.
    """

    def __init__(self, deliver: Callable[[SharedWeights], None], credit: int) -> None:
        self._deliver = deliver
        self._puller = ChunkPuller(self, credit)
        self._pool = MemoryPool()
        self._arriving: SharedWeights | None = None

    def pull(self, connection: Connection, manifest: Manifest, stats: TransferStats) -> bool:
        """See `common.weights.follow.Puller`."""
        return self._puller.pull(connection, manifest, stats)

    def begin(self, manifest: Manifest) -> None:
        """Make room for weights on their way."""
        if self._arriving is not None:
            self._arriving.close()
        self._arriving = SharedWeights(manifest, self._pool.take(manifest.total_bytes), self._pool.give_back)

    def chunk(self, index: int, data: memoryview) -> None:
        """Put a chunk in its place."""
        assert self._arriving is not None
        self._arriving.write(self._arriving.manifest.chunk_range(index)[0], data)

    def end(self, seconds: float) -> None:
        """Hand the weights out."""
        assert self._arriving is not None
        weights, self._arriving = self._arriving, None
        weights.seconds = seconds
        self._deliver(weights)

    def close(self) -> None:
        """Give all memory back."""
        if self._arriving is not None:
            self._arriving.close()
            self._arriving = None
        self._pool.close()
