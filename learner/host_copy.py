"""Copies of weights in host memory: on a GPU into pinned memory, by a stream of its own.

The GPU goes on with the next batch meanwhile, and waits only before it changes the weights. On a CPU a copy is a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from common.weights.memory import MemoryFile


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

    @property
    def is_beside(self) -> bool:
        """Whether copies go on while this thread does something else."""
        return self._stream is not None

    def mark(self) -> Callable[[], None]:
        """What waits for the copies that were added so far; for any thread."""
        return self._stream.record_event().synchronize if self._stream is not None else _nothing

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


class HostMemory:
    """Memory for such a copy, which other processes of the machine can be handed; pinned where there is a GPU.

    Args:
        file: what holds it; by default, of its own.

    Attributes:
        data: uint8 [size].
        file: see above.
    """

    def __init__(self, size: int, file: MemoryFile | None = None) -> None:
        self.file = MemoryFile(size) if file is None else file
        self.data = torch.from_numpy(self.file.data)
        if size and torch.cuda.is_available():
            address = self.data.data_ptr()
            # Where memory must not be locked, copies are slower and otherwise the same.
            if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:
                weakref.finalize(self.file.data, _unpin, address).atexit = False


def _nothing() -> None:
    pass


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
