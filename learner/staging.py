"""The memory on the learner's GPU through which weights leave it: a few buffers of one size, for all groups."""

from __future__ import annotations

import queue
from collections.abc import Callable

import torch

BUFFERS = 4
TICK = 0.5  # seconds between two looks whether the one who waits is still wanted


class Staging:
    """Lends buffers, each to one user at a time. A user that hangs keeps its own, and delays no other.

    Args:
        size: of each of the `BUFFERS`, in bytes.
        device: where they are.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self._free: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put(self._new())

    def take(self, is_wanted: Callable[[], bool]) -> torch.Tensor | None:
        """A buffer, uint8 [size], once one is free; None where `is_wanted`, asked regularly, is false before that."""
        while is_wanted():
            try:
                buffer = self._free.get(timeout=TICK)
            except queue.Empty:
                continue
            return self._new() if buffer is None else buffer
        return None

    def give_back(self, buffer: torch.Tensor) -> None:
        """Nobody reads or writes the buffer any more."""
        self._free.put(buffer)

    def replace(self, buffer: torch.Tensor) -> None:
        """Nobody knows how long the GPU will still use the buffer: others get another, the user holds on to it.

        It is made by whoever takes it: making it here may wait for the GPU, which the user has yet to call off.
        """
        self._free.put(None)

    def _new(self) -> torch.Tensor:
        buffer = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        if self._device.type == "cuda":
            # It may be memory that training has just given up, and that the GPU is not yet done with.
            torch.cuda.current_stream(self._device).synchronize()
        return buffer
