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
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put(torch.empty(size, dtype=torch.uint8, device=device))

    def take(self, is_wanted: Callable[[], bool]) -> torch.Tensor | None:
        """A buffer, uint8 [size], once one is free; None where `is_wanted`, asked regularly, is false before that."""
        while is_wanted():
            try:
                return self._free.get(timeout=TICK)
            except queue.Empty:
                continue
        return None

    def give_back(self, buffer: torch.Tensor) -> None:
        """Nobody reads or writes the buffer any more."""
        self._free.put(buffer)

    def replace(self, buffer: torch.Tensor) -> None:
        """Nobody knows how long the GPU will still use the buffer: others get another, the user holds on to it."""
        self._free.put(torch.empty_like(buffer))
