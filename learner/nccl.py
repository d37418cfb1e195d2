"""NCCL as the learner needs it: groups that are not torch's, in which this process is rank 0 and broadcasts bytes.

torch has no way to meet workers of another program; vLLM's side meets us by a unique id, joins with `ncclCommInitRank`
and sums one element over the group at once (`PyNcclCommunicator.from_unique_id_bytes`), so we do the same.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

UNIQUE_ID_BYTES = 128
UINT8, FLOAT32 = 1, 7  # ncclDataType_t
SUM = 0  # ncclRedOp_t
LIBRARY = "libnccl.so.2"  # torch has loaded it already, from its own wheel
PAUSE = 0.0005  # seconds between looks whether a broadcast is over


class NcclFailed(Exception):
    """A group is broken, or NCCL refuses something."""


class Communicator(Protocol):
    """One group; this process is its rank 0. Used by one thread."""

    def broadcast(self, pieces: Sequence[torch.Tensor], alive: Callable[[], bool]) -> None:
        """Send uint8 pieces [N_i] in host memory, one after another in one buffer; returns when all have it.

        Raises:
            NcclFailed: NCCL says so, or `alive`, asked regularly, is no longer true.
        """
        ...

    def abort(self) -> None:
        """Leave the group, whatever the others do; may be called again."""
        ...


class Nccl(Protocol):
    """Makes groups."""

    def unique_id(self) -> bytes:
        """The id of a new group, for all who are to join it."""
        ...

    def join(self, unique_id: bytes, size: int) -> Communicator:
        """Become rank 0 of `size`; blocks until all others have joined. Raises `NcclFailed`."""
        ...


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class Library:
    """The few functions of libnccl that are called, with its errors as `NcclFailed`.

    Raises:
        NcclFailed: there is no such library.
    """

    def __init__(self, path: str = LIBRARY) -> None:
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise NcclFailed(f"no NCCL library: {error}") from None
        comm, stream, buffer = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
        size, number = ctypes.c_size_t, ctypes.c_int
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
        library.ncclCommInitRank.argtypes = [ctypes.POINTER(comm), number, _UniqueId, number]
        library.ncclAllReduce.argtypes = [buffer, buffer, size, number, number, comm, stream]
        library.ncclBroadcast.argtypes = [buffer, buffer, size, number, number, comm, stream]
        library.ncclCommGetAsyncError.argtypes = [comm, ctypes.POINTER(number)]
        library.ncclCommAbort.argtypes = [comm]
        self._library: Any = library

    def unique_id(self) -> bytes:
        """`ncclGetUniqueId`."""
        made = _UniqueId()
        self._check("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def init_rank(self, size: int, unique_id: bytes, rank: int) -> int:
        """`ncclCommInitRank`; the communicator's handle."""
        handle = ctypes.c_void_p()
        self._check("ncclCommInitRank", ctypes.byref(handle), size, _UniqueId.from_buffer_copy(unique_id), rank)
        assert handle.value is not None
        return handle.value

    def all_reduce(self, data: int, count: int, comm: int, stream: int) -> None:
        """`ncclAllReduce` of float32, in place: their sum."""
        self._check("ncclAllReduce", data, data, count, FLOAT32, SUM, comm, stream)

    def broadcast(self, data: int, count: int, root: int, comm: int, stream: int) -> None:
        """`ncclBroadcast` of bytes, in place."""
        self._check("ncclBroadcast", data, data, count, UINT8, root, comm, stream)

    def check(self, comm: int) -> None:
        """Raise what went wrong in a communicator since (`ncclCommGetAsyncError`)."""
        code = ctypes.c_int()
        self._check("ncclCommGetAsyncError", comm, ctypes.byref(code))
        if code.value:
            raise NcclFailed(self._reason("a broadcast", code.value))

    def abort(self, comm: int) -> None:
        """`ncclCommAbort`."""
        self._check("ncclCommAbort", comm)

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise NcclFailed(self._reason(name, code))

    def _reason(self, what: str, code: int) -> str:
        return f"{what}: {self._library.ncclGetErrorString(code).decode()}"


class CudaNccl:
    """Groups over a GPU of this process, each with a stream of its own beside training's."""

    def __init__(self, device: torch.device, library: Library | None = None) -> None:
        self._device = device
        self._library = library or Library()

    def unique_id(self) -> bytes:
        """See `Nccl`."""
        return self._library.unique_id()

    def join(self, unique_id: bytes, size: int) -> Communicator:
        """See `Nccl`."""
        torch.cuda.set_device(self._device)
        handle = self._library.init_rank(size, unique_id, 0)
        made = CudaCommunicator(self._library, handle, self._device)
        made.warm_up()
        return made


class CudaCommunicator:
    """A `Communicator` that copies each buffer to the GPU and broadcasts it from there."""

    def __init__(self, library: Library, handle: int, device: torch.device) -> None:
        self._library, self._device = library, device
        self._handle: int | None = handle
        self._stream = torch.cuda.Stream(device)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def warm_up(self) -> None:
        """The sum that vLLM's side begins with."""
        with torch.cuda.stream(self._stream):
            one = torch.zeros(1, device=self._device)
            self._library.all_reduce(one.data_ptr(), 1, self._open(), self._stream.cuda_stream)
        self._stream.synchronize()

    def broadcast(self, pieces: Sequence[torch.Tensor], alive: Callable[[], bool]) -> None:
        """See `Communicator`."""
        size = sum(len(piece) for piece in pieces)
        with torch.cuda.stream(self._stream):
            if len(self._buffer) < size:
                self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            start = 0
            for piece in pieces:
                self._buffer[start : start + len(piece)].copy_(piece)
                start += len(piece)
            self._library.broadcast(self._buffer.data_ptr(), size, 0, self._open(), self._stream.cuda_stream)
            sent = torch.cuda.Event()
            sent.record(self._stream)
        while not sent.query():
            self._library.check(self._open())
            if not alive():
                raise NcclFailed("the generator does not receive")
            time.sleep(PAUSE)

    def abort(self) -> None:
        """See `Communicator`."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._library.abort(handle)

    def _open(self) -> int:
        if self._handle is None:
            raise NcclFailed("the group is dissolved")
        return self._handle
