"""Snapshots of weights, and the files of shared memory that hold them."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from common.unpack import Buffer
from common.weights.wire import Manifest


class MemoryFile:
    """An anonymous memory file.

    It has no name in any file system: the kernel frees it with the last process that holds it, however that process
    ends. It counts as memory of the process that writes to it, and is not limited by the size of /dev/shm. Other
    processes of this user open it at `path` while this one lives; other containers get its descriptor
    (`common.weights.handover`).

    Attributes:
        size: bytes; it cannot change, so that no reader finds less than it mapped.
        number: file descriptor.
        data: uint8 [size].

    Raises:
        OSError: not enough memory.
    """

    def __init__(self, size: int, number: int | None = None, access: int = mmap.ACCESS_WRITE) -> None:
        is_new = number is None
        if number is None:
            number = os.memfd_create("spo-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, number)
        try:
            if is_new:
                # An empty model has nothing to map, and mmap refuses length 0.
                os.ftruncate(number, max(size, 1))
                fcntl.fcntl(number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            elif not fcntl.fcntl(number, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(number).st_size < size:
                raise ValueError("not the memory of this snapshot")
            mapping = mmap.mmap(number, max(size, 1), access=access)
            self._data: np.ndarray | None = np.frombuffer(mapping, np.uint8)[:size]
        except BaseException:
            self._close()
            raise
        self.size, self.number, self.path = size, number, f"/proc/{os.getpid()}/fd/{number}"

    @classmethod
    def received(cls, number: int, size: int) -> Self:
        """Map a file that another process has handed over, to read it; takes the descriptor over.

        Raises:
            ValueError: it is not such a file, or smaller than `size`.
            OSError: it cannot be mapped.
        """
        return cls(size, number, mmap.ACCESS_READ)

    @classmethod
    def opened(cls, path: str, size: int) -> Self:
        """Map the file of another process of this user, by its `path`, to write to it; raises what `received` does.

        OSError also means that the process has ended, or is another user's.
        """
        return cls(size, os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def inode(self) -> int:
        """A number that identifies the file among those of this machine."""
        return os.fstat(self.number).st_ino

    @property
    def data(self) -> np.ndarray:
        assert self._data is not None, "closed"
        return self._data

    def write(self, start: int, data: Buffer) -> None:
        # Unlike a slice assignment of memoryviews, this lets other threads run meanwhile.
        np.copyto(self.data[start : start + len(data)], np.frombuffer(data, np.uint8))

    def view(self, start: int, end: int) -> memoryview:
        """Bytes of the file, which may be overwritten later."""
        return self.data[start:end].data

    def close(self) -> None:
        """Give the memory back; may be called again. Views of it keep it mapped."""
        if self._data is not None:
            self._data = None
            self._close()


@dataclass(eq=False)
class Snapshot:
    """One version's weights as a server sends them: the manifest, packed once, and its chunks."""

    manifest: Manifest
    chunks: list[memoryview | None]  # bytes of each; None until it has arrived
    file: MemoryFile  # holds the chunks; other processes of this machine are handed it
    # Of each chunk from the manifest's `base`; None if there is none, so that the chunk itself is sent.
    deltas: list[memoryview | None] = field(default_factory=list)
    memory: Any = None  # the object that `file` belongs to, to which the next snapshot can be written
    packed_manifest: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.packed_manifest = self.manifest.pack()
        self.deltas = self.deltas or [None] * len(self.chunks)

    @classmethod
    def whole(cls, manifest: Manifest, file: MemoryFile, memory: Any = None) -> Self:
        """A snapshot whose chunks are all in the file."""
        ranges = map(manifest.chunk_range, range(len(manifest.checksums)))
        return cls(manifest, [file.view(*bounds).toreadonly() for bounds in ranges], file, memory=memory)

    @classmethod
    def arriving(cls, manifest: Manifest, file: MemoryFile) -> Self:
        """A snapshot without any chunk yet; each is written to the file as it arrives."""
        return cls(manifest, [None] * len(manifest.checksums), file)

    @property
    def name(self) -> str:
        return self.manifest.snapshot

    @property
    def complete(self) -> bool:
        return None not in self.chunks


@dataclass
class Transfer:
    """A snapshot that is being received into a file."""

    manifest: Manifest
    file: MemoryFile
    # The file with the snapshot that deltas start from; None if it is not here. It may be `file` itself, whose missing
    # chunks still hold the base's bytes.
    base: MemoryFile | None = None
    missing: set[int] = field(init=False)  # chunks that have not arrived
    seconds: float = 0.0  # spent on it so far

    def __post_init__(self) -> None:
        self.missing = set(range(len(self.manifest.checksums)))


@dataclass
class TransferStats:
    """Counts over all transfers of a client, and where it pulls from now."""

    transferred_bytes: int = 0  # size of the snapshots that arrived
    received_bytes: int = 0  # over the network; fewer than those if chunks came as deltas
    delta_chunks: int = 0  # chunks that came as deltas
    seconds: float = 0.0
    corrupt_chunks: int = 0  # chunks and deltas with wrong checksums
    restarts: int = 0
    reconnects: int = 0
    source: str = ""
