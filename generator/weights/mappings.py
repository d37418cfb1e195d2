"""Memory files of weight updates, kept mapped from one update to the next.

Mapping a file anew costs a page fault for each page that is read, and pinning it for copies to a GPU costs more: both
once a file here, and the same one or two files serve all updates.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from collections import OrderedDict

import torch

KEPT = 2  # files: that of the last weights, and that of those which arrived meanwhile
READ_ONLY = 8  # cudaHostRegisterReadOnly


class Mapping:
    """A whole file as bytes; registered with CUDA where there is a GPU, so that copies to it need no buffer.

    Attributes:
        data: uint8 [size]; shows what is written to the file later.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError if the file cannot be opened."""
        try:
            file, access = os.open(path, os.O_RDWR), mmap.ACCESS_WRITE
        except PermissionError:
            file, access = os.open(path, os.O_RDONLY), mmap.ACCESS_READ
        try:
            self._map = mmap.mmap(file, 0, access=access)
        finally:
            os.close(file)
        with warnings.catch_warnings():
            # That memory is read-only; nobody writes to it.
            warnings.simplefilter("ignore", UserWarning)
            self.data: torch.Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._registered = False
        if torch.cuda.is_available():
            flags = READ_ONLY if access == mmap.ACCESS_READ else 0
            # Where memory must not be locked, copies are slower and otherwise the same.
            self._registered = _register(self.data, flags)

    def close(self) -> None:
        """Give the mapping up; memory that tensors still show stays mapped until the last of them is gone."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())
            self._registered = False
        del self.data
        with contextlib.suppress(BufferError):
            self._map.close()


def _register(data: torch.Tensor, flags: int) -> bool:
    """Whether that was possible."""
    if int(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), flags)) == 0:
        return True
    # CUDA keeps the error, and torch takes it for that of the next kernel that this thread starts: of this one.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return False


class Mappings:
    """The mappings of the last files that were asked for."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, int], Mapping] = OrderedDict()

    def open(self, path: str) -> torch.Tensor:
        """A file's bytes, uint8 [size]. A path may stand for another file later. Raises OSError if there is none."""
        status = os.stat(path)
        file = status.st_dev, status.st_ino
        if file not in self._kept:
            while len(self._kept) >= KEPT:
                self._kept.popitem(last=False)[1].close()
            self._kept[file] = Mapping(path)
        self._kept.move_to_end(file)
        return self._kept[file].data

    def close(self) -> None:
        """Give all mappings up."""
        while self._kept:
            self._kept.popitem()[1].close()
