"""Copies of weights in host memory: on a GPU into pinned memory, by a stream of its own.

The GPU goes on with the next batch meanwhile, and waits only before it changes the weights. On a CPU a copy is a copy.
"""

from __future__ import annotations

import torch


class HostCopy:
    """One version on its way into one block of memory.

    Args:
        device: where the weights are.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def add(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy a tensor to memory of its shape, which may be of another type; it need not outlive the call."""
        if self._stream is None or not tensor.is_cuda:
            target.copy_(tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            target.copy_(tensor.to(target.dtype), non_blocking=True)
        # Memory that is given back now, as that of a gathered parameter is, serves nobody else before the copy.
        tensor.record_stream(self._stream)

    def end(self) -> None:
        """All tensors were added."""
        if self._stream is not None:
            self._done = self._stream.record_event()

    def before_update(self) -> None:
        """Have the GPU, not this thread, wait for the copy; before anything writes to the weights."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        """Return when the copy can be read."""
        if self._done is not None:
            self._done.synchronize()


def host_memory(size: int) -> torch.Tensor:
    """Memory for such a copy, uint8 [size]; pinned where there is a GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
