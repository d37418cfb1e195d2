"""Memory files of weight updates, mapped from one update to the next.

Mapping a file again costs a page fault for each page that is read, and pinning it for copies to a GPU costs more; the
same one or two files serve all updates.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from collections import OrderedDict

import torch

KEPT = 2  # files: one with the last weights, one with those that arrived meanwhile
READ_ONLY = 8  # cudaHostRegisterReadOnly


class Mappings:
    """The last files that were opened, mapped as a whole.

    They are registered with CUDA if there is a GPU, so that copies to it need no buffer.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, int], tuple[torch.Tensor, bool]] = OrderedDict()

    def open(self, path: str) -> torch.Tensor:
        """Return a file's bytes, uint8 [size]; raises OSError if there is none. Paths may be reused."""
        status = os.stat(path)  # a path may name another file than before
        file = status.st_dev, status.st_ino
        if file not in self._kept:
            while len(self._kept) >= KEPT:
                self._drop_oldest()
            self._kept[file] = _mapped(path)
        self._kept.move_to_end(file)
        return self._kept[file][0]

    def close(self) -> None:
        while self._kept:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Forget a mapping, which ends with the last tensor that uses it."""
        data, is_registered = self._kept.popitem(last=False)[1]
        if is_registered:
            torch.cuda.cudart().cudaHostUnregister(data.data_ptr())


def _mapped(path: str) -> tuple[torch.Tensor, bool]:
    """Map a file; returns its bytes, which follow later writes, and whether they are registered with CUDA."""
    try:
        file, access = os.open(path, os.O_RDWR), mmap.ACCESS_WRITE
    except PermissionError:
        file, access = os.open(path, os.O_RDONLY), mmap.ACCESS_READ
    try:
        mapping = mmap.mmap(file, 0, access=access)
    finally:
        os.close(file)
    with warnings.catch_warnings():
        # torch warns if the memory is read-only; nothing writes to it.
        warnings.simplefilter("ignore", UserWarning)
        data = torch.frombuffer(mapping, dtype=torch.uint8)
    if not torch.cuda.is_available():
        return data, False
    flags = READ_ONLY if access == mmap.ACCESS_READ else 0
    if int(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), flags)) == 0:
        return data, True
    # If memory must not be locked, copies are only slower. CUDA keeps the error, and torch would report it for the next
    # kernel of this thread; starting one here clears it.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return data, False
