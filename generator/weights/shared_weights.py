"""Weights in shared memory, mapped by every engine process: written once by the transfer, or the learner's own copy."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from common.weights.memory import MemoryFile
from common.weights.wire import Manifest


class SharedWeights(AbstractContextManager[Any]):
    """One snapshot in a memory file.

    Attributes:
        seconds: how long the transfer took.
        path: the file's path, for other processes of this user.
        lora_scaling: see `weight_engine.UpdateInfo`.
    """

    def __init__(
        self, manifest: Manifest, file: MemoryFile, seconds: float, give_back: Callable[[MemoryFile], None]
    ) -> None:
        self.manifest, self.version, self.seconds, self.path = manifest, manifest.version, seconds, file.path
        self.lora_scaling: float | None = None
        self._file: MemoryFile | None = file
        self._give_back = give_back

    def view(self, start: int, end: int) -> memoryview:
        assert self._file is not None
        return self._file.view(start, end)

    def update_info(self) -> dict[str, Any]:
        """The fields of `weight_engine.UpdateInfo`, from which vLLM's workers load the weights."""
        manifest = self.manifest
        return {
            "path": self.path,
            "names": manifest.names,
            "dtypes": manifest.dtypes,
            "shapes": manifest.shapes,
            "offsets": manifest.offsets,
            "lora_scaling": self.lora_scaling,
        }

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back, once all workers have loaded the weights or none will; may be called again."""
        if self._file is not None:
            file, self._file = self._file, None
            self._give_back(file)


def tensors(columns: Any, data: Any) -> Iterator[tuple[str, Any]]:
    """The tensors that a manifest or `UpdateInfo` describes in a snapshot's bytes (uint8 [size]), without a copy."""
    import torch

    for name, dtype, shape, offset in zip(columns.names, columns.dtypes, columns.shapes, columns.offsets, strict=True):
        kind = getattr(torch, dtype)
        end = offset + math.prod(shape) * kind.itemsize
        yield name, data[offset:end].view(kind).view(shape)


class MemoryPool:
    """Keeps the memory of the last transfer for the next: writing to fresh memory takes ten times as long.

    A file that is taken has one user and may get more; it is free once all have given it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[MemoryFile, int] = {}
        self._spare: MemoryFile | None = None
        self._open = True

    def take(self, size: int) -> MemoryFile:
        """Return a file of `size` bytes; its content is not cleared."""
        with self._lock:
            file, self._spare = self._spare, None
            if file is not None and file.size != size:
                file.close()
                file = None
            file = file or MemoryFile(size)
            self._users[file] = 1
            return file

    def share(self, file: MemoryFile) -> None:
        """Add a user of a file that was taken."""
        with self._lock:
            self._users[file] += 1

    def users(self, file: MemoryFile) -> int:
        """Count the users that have yet to give a file back."""
        with self._lock:
            return self._users.get(file, 0)

    def give_back(self, file: MemoryFile) -> None:
        """End one user's use. A file without users is kept for the next transfer, or closed if one is kept already."""
        with self._lock:
            self._users[file] -= 1
            if self._users[file]:
                return
            del self._users[file]
            if self._open and self._spare is None:
                self._spare = file
                return
        file.close()

    def close(self) -> None:
        """Free all memory; files still in use are freed once they are given back."""
        with self._lock:
            self._open = False
            if self._spare is not None:
                self._spare.close()
                self._spare = None
