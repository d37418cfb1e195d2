"""Weights in shared memory: written once by the transfer, mapped by every engine process."""

from __future__ import annotations

import mmap
import os
from typing import Any, Self

import numpy as np

from common.weights import Buffer, Manifest


class SharedWeights:
    """An anonymous memory file that holds one snapshot.

    It has no name in any file system: the kernel frees it with the last process that holds it, however
    that process ends. Other processes of this user open it at `path`.

    Raises:
        OSError: not enough memory.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.version = manifest.version
        self.seconds = 0.0  # the transfer took
        self._file = os.memfd_create(f"spo-weights-{manifest.version}")
        try:
            # An empty model has nothing to map, and mmap refuses length 0.
            os.ftruncate(self._file, max(manifest.total_bytes, 1))
            self._map = mmap.mmap(self._file, max(manifest.total_bytes, 1))
        except BaseException:
            os.close(self._file)
            raise
        self._bytes: np.ndarray | None = np.frombuffer(self._map, np.uint8)

    @property
    def path(self) -> str:
        """Where other processes find the file while this one lives and holds it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def write(self, start: int, data: Buffer) -> None:
        """Put bytes in their place."""
        assert self._bytes is not None
        # Unlike a slice assignment of memoryviews, this lets other threads run meanwhile.
        np.copyto(self._bytes[start : start + len(data)], np.frombuffer(data, np.uint8))

    def update_info(self) -> dict[str, Any]:
        """What vLLM's workers need to load the file (see `weight_engine.UpdateInfo`)."""
        manifest = self.manifest
        return {
            "path": self.path,
            "names": manifest.names,
            "dtypes": manifest.dtypes,
            "shapes": manifest.shapes,
            "offsets": manifest.offsets,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back; may be called again."""
        if self._bytes is not None:
            self._bytes = None
            self._map.close()
            os.close(self._file)
