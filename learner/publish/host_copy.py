"""Copies weights to host memory: from a GPU into pinned memory, in a stream of its own.

Meanwhile the GPU continues with the next batch, and waits only before it changes the weights. On a CPU the copy is done
at once.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable

import torch

from common.weights.memory import MemoryFile


class HostCopy:
    """The copy of one version, whose weights are on `device`, into one block of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None

    def add(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy a tensor to memory of the same shape, possibly of another type; the tensor need not outlive the call."""
        if self._stream is None or not tensor.is_cuda:
            target.copy_(tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            target.copy_(tensor.to(target.dtype), non_blocking=True)
        # If the tensor is freed now, as a gathered parameter is, its memory must not be reused before it is copied.
        tensor.record_stream(self._stream)

    @property
    def is_beside(self) -> bool:
        """Whether copies run while this thread does something else."""
        return self._stream is not None

    def mark(self) -> Callable[[], None]:
        """A function that waits, in any thread, for the copies added so far."""
        if self._stream is None:
            return lambda: None
        # Waiting for such an event blocks; a thread that polls would keep a core busy.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return functools.partial(_wait, event, self._device)

    def before_update(self) -> None:
        """Make the GPU, but not this thread, wait for the copy; call this before anything writes to the weights."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class HostMemory:
    """Host memory for a copy of the weights, which can be handed to other processes of the machine.

    Args:
        is_pinned: pin the memory if there is a GPU. All of it is then allocated, even what is never written to.

    Attributes:
        data: uint8 [size].
        file: holds the memory; by default a new one.
    """

    def __init__(self, size: int, file: MemoryFile | None = None, is_pinned: bool = True) -> None:
        self.file = MemoryFile(size) if file is None else file
        self.data = torch.from_numpy(self.file.data)
        if size and is_pinned and torch.cuda.is_available():
            address = self.data.data_ptr()
            # If the system refuses to pin memory, copies are slower and otherwise the same.
            if _pin(address, size):
                weakref.finalize(self.file.data, _unpin, address, torch.cuda.current_device()).atexit = False


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of all copies, so that they follow one another."""
    return torch.cuda.Stream(device, priority=-1)


def _wait(event: torch.cuda.Event, device: torch.device) -> None:
    """Wait in this thread, on the copy's GPU: new threads are on GPU 0, where waiting would take half a gigabyte."""
    with torch.cuda.device(device):
        event.synchronize()


def _pin(address: int, size: int) -> bool:
    """Pin the memory; False if the system refuses."""
    if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:
        return True
    # CUDA keeps the error, and torch raises it at the thread's next kernel. Start one here, so that no later one fails.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return False


def _unpin(address: int, device: int) -> None:
    """Unpin the memory, in any thread; see `_wait`."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)
