"""Copies of weights in host memory: on a GPU into pinned memory, by a stream of its own.

The GPU goes on with the next batch meanwhile, and waits only before it changes the weights. On a CPU a copy is a copy.
"""

from __future__ import annotations

import contextlib
import functools
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
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None
        self._done: torch.cuda.Event | None = None

    def add(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy a tensor to memory of its shape, which may be of another type; it need not outlive the call."""
        if self._stream is None or not tensor.is_cuda:
            target.copy_(tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            target.copy_(tensor.to(target.dtype), non_blocking=True)
        # Memory that is given back now, as that of a gathered parameter is, serves nothing else before the copy.
        tensor.record_stream(self._stream)

    @property
    def is_beside(self) -> bool:
        """True if copies go on while this thread does something else."""
        return self._stream is not None

    def mark(self) -> Callable[[], None]:
        """Make a function that waits for the copies added so far; for any thread."""
        if self._stream is None:
            return _nothing
        return functools.partial(_wait, _event(self._stream), self._device)

    def end(self) -> None:
        """All tensors were added."""
        if self._stream is not None:
            self._done = _event(self._stream)

    def before_update(self) -> None:
        """Have the GPU, not this thread, wait for the copy; before anything writes to the weights."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        """Return when the copy can be read."""
        if self._done is not None:
            _wait(self._done, self._device)


class HostMemory:
    """Memory for such a copy, which other processes of the machine can be handed.

    Args:
        file: what holds it; by default, of its own.
        is_pinned: where there is a GPU. Pinned memory is there as a whole, also what is never written to.

    Attributes:
        data: uint8 [size].
        file: see above.
    """

    def __init__(self, size: int, file: MemoryFile | None = None, is_pinned: bool = True) -> None:
        self.file = MemoryFile(size) if file is None else file
        self.data = torch.from_numpy(self.file.data)
        if size and is_pinned and torch.cuda.is_available():
            address = self.data.data_ptr()
            # Where memory must not be locked, copies are slower and otherwise the same.
            if _pin(address, size):
                weakref.finalize(self.file.data, _unpin, address, torch.cuda.current_device()).atexit = False


def _nothing() -> None:
    pass


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The one of all copies, so that they follow one another."""
    return torch.cuda.Stream(device, priority=-1)


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """When all that is in the stream now is done. Many threads wait for one, and would each keep a core busy."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def _wait(event: torch.cuda.Event, device: torch.device) -> None:
    """Have this thread wait. A thread begins at the first GPU, on which waiting would take half a gigabyte."""
    with torch.cuda.device(device):
        event.synchronize()


def _pin(address: int, size: int) -> bool:
    """Pin the memory; False where the system refuses."""
    if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:
        return True
    # CUDA keeps the error, and torch takes it for that of the next kernel that this thread starts: of this one.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return False


def _unpin(address: int, device: int) -> None:
    """In whichever thread lets go of the memory last; see `_wait`."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)
