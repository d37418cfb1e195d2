"""Files of shared memory that hold a snapshot."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import Self

import numpy as np

from common.unpack import Buffer


class MemoryFile:
    """An anonymous memory file.

    It has no name in any file system: the kernel frees it with the last process that holds it, however that process
    ends. It counts as memory of the process that writes to it, and the size of /dev/shm is no limit. Other processes of
    this user open it at `path` while this one lives; those that may not look into this process are handed its `number`
    (`common.weights.handover`).

    Attributes:
        size: bytes; nobody can change it, so that no reader finds less than it mapped.
        number: file descriptor.
        data: uint8 [size].

    Raises:
        OSError: not enough memory.
    """

    def __init__(self, size: int) -> None:
        number = os.memfd_create("spo-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, number)
        try:
            # An empty model has nothing to map, and mmap refuses length 0.
            os.ftruncate(number, max(size, 1))
            fcntl.fcntl(number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map(number, size, mmap.ACCESS_WRITE)
        except BaseException:
            self._close()
            raise

    @classmethod
    def received(cls, number: int, size: int) -> Self:
        """One that another process has handed over, to be read; takes the descriptor over.

        Raises:
            ValueError: it is no such file, or smaller than `size`.
            OSError: it cannot be mapped.
        """
        return cls._adopt(number, size, mmap.ACCESS_READ)

    @classmethod
    def opened(cls, path: str, size: int) -> Self:
        """That of another process of this user, by its `path`, to be written to.

        Raises:
            ValueError, OSError: as of `received`; the process has ended, or is another user's.
        """
        return cls._adopt(os.open(path, os.O_RDWR | os.O_CLOEXEC), size, mmap.ACCESS_WRITE)

    @classmethod
    def _adopt(cls, number: int, size: int, access: int) -> Self:
        made = cls.__new__(cls)
        made._close = weakref.finalize(made, os.close, number)
        try:
            seals = fcntl.fcntl(number, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK or os.fstat(number).st_size < size:
                raise ValueError("not the memory of this snapshot")
            made._map(number, size, access)
        except BaseException:
            made._close()
            raise
        return made

    def _map(self, number: int, size: int, access: int) -> None:
        self.size, self.number, self.path = size, number, f"/proc/{os.getpid()}/fd/{number}"
        self._mapping: mmap.mmap | None = mmap.mmap(number, max(size, 1), access=access)
        self._data: np.ndarray | None = np.frombuffer(self._mapping, np.uint8)[:size]

    @property
    def inode(self) -> int:
        """Which no other such file of this machine has."""
        return os.fstat(self.number).st_ino

    @property
    def data(self) -> np.ndarray:
        """See the class."""
        assert self._data is not None, "closed"
        return self._data

    def write(self, start: int, data: Buffer) -> None:
        """Put bytes in their place."""
        # Unlike a slice assignment of memoryviews, this lets other threads run meanwhile.
        np.copyto(self.data[start : start + len(data)], np.frombuffer(data, np.uint8))

    def view(self, start: int, end: int) -> memoryview:
        """Bytes of the file, which may be overwritten later."""
        return self.data[start:end].data

    def close(self) -> None:
        """Give the memory back; may be called again. What still shows it keeps it mapped."""
        if self._data is not None:
            self._data = self._mapping = None
            self._close()
