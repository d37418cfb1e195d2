"""NCCL as the learner needs it: groups in which this process is rank 0 and broadcasts bytes to a generator's workers.

libnccl is called through ctypes because torch's own bindings (`torch.cuda.nccl`) cannot abort: a broadcast to a
generator that has died would stay on the GPU for ever. vLLM's bindings would do, but the learner runs without vLLM.
vLLM's side joins by a unique id with `ncclCommInitRank` and then sums one element over the group
(`PyNcclCommunicator.from_unique_id_bytes`), so rank 0 does the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import time
from collections.abc import Callable
from typing import Any

import torch

UNIQUE_ID_BYTES = 128
UINT8, FLOAT32 = 1, 7  # ncclDataType_t
SUM = 0  # ncclRedOp_t
LIBRARY = "libnccl.so.2"  # torch has loaded it already, from its own wheel
POLL_INTERVAL = 0.0005  # seconds between checks whether a broadcast is over


class NcclError(Exception):
    """A group is broken, or NCCL refuses a call."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class Nccl:
    """libnccl, and the groups that are made with it.

    Args:
        device: GPU of this process that broadcasts.
        path: of the library.

    Attributes:
        device: the same.

    Raises:
        NcclError: there is no such library.
    """

    def __init__(self, device: torch.device, path: str = LIBRARY) -> None:
        try:
            self._library: Any = ctypes.CDLL(path)
        except OSError as error:
            raise NcclError(f"no NCCL library: {error}") from None
        self.device = device
        self._streams: queue.SimpleQueue[torch.cuda.Stream] = queue.SimpleQueue()  # of groups that have ended
        pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        for name, arguments in {
            "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
            "ncclCommInitRank": [ctypes.POINTER(pointer), number, _UniqueId, number],
            "ncclAllReduce": [pointer, pointer, size, number, number, pointer, pointer],
            "ncclBroadcast": [pointer, pointer, size, number, number, pointer, pointer],
            "ncclCommGetAsyncError": [pointer, ctypes.POINTER(number)],
            "ncclCommAbort": [pointer],
        }.items():
            getattr(self._library, name).argtypes = arguments
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library; raises `NcclError` where it fails."""
        self.check(getattr(self._library, name)(*arguments), name)

    def check(self, code: int, name: str) -> None:
        """Raise `NcclError` for an error code, in NCCL's words."""
        if code:
            raise NcclError(f"{name}: {self._library.ncclGetErrorString(code).decode()}")

    def unique_id(self) -> bytes:
        """The id of a new group, for all who are to join it."""
        unique_id = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def join(self, unique_id: bytes, size: int) -> Communicator:
        """Become rank 0 of a group of `size`; blocks until all others have joined. Raises `NcclError`."""
        torch.cuda.set_device(self.device)
        return Communicator(self, self.init_rank(unique_id, size, 0))

    def take_stream(self) -> torch.cuda.Stream:
        """A stream that no other group has, and not training.

        Torch hands out the same 32 of a priority in turn, so each goes back once its group has ended, and they are not
        of the priority that training, DeepSpeed and torch's own NCCL have theirs of.
        """
        with contextlib.suppress(queue.Empty):
            return self._streams.get_nowait()
        return torch.cuda.Stream(self.device, priority=-2)

    def give_back_stream(self, stream: torch.cuda.Stream) -> None:
        """Nothing waits in it any more."""
        self._streams.put(stream)

    def init_rank(self, unique_id: bytes, size: int, rank: int) -> ctypes.c_void_p:
        """`ncclCommInitRank`: the communicator's handle."""
        handle = ctypes.c_void_p()
        self.call("ncclCommInitRank", ctypes.byref(handle), size, _UniqueId.from_buffer_copy(unique_id), rank)
        return handle


class Communicator:
    """One group, with a stream of its own beside training's. Used by one thread."""

    def __init__(self, nccl: Nccl, handle: ctypes.c_void_p) -> None:
        self._nccl = nccl
        self._handle: ctypes.c_void_p | None = handle
        self._stream = nccl.take_stream()
        with torch.cuda.stream(self._stream):
            one = torch.zeros(1, device=nccl.device)
            self._call("ncclAllReduce", one.data_ptr(), one.data_ptr(), 1, FLOAT32, SUM)
        self._stream.synchronize()

    def broadcast(self, piece: torch.Tensor, buffer: torch.Tensor, alive: Callable[[], bool]) -> None:
        """Send uint8 [N] from host memory by way of a buffer [>= N] on the GPU; returns when all have it.

        Raises:
            NcclError: NCCL reports an error, or `alive`, asked regularly, is no longer true. The GPU may then still use
                the buffer, until `abort` has returned.
        """
        with torch.cuda.stream(self._stream):
            part = buffer[: len(piece)]
            part.copy_(piece, non_blocking=True)
            self._call("ncclBroadcast", part.data_ptr(), part.data_ptr(), len(piece), UINT8, 0)
            sent = torch.cuda.Event()
            sent.record(self._stream)
        while not sent.query():
            code = ctypes.c_int()
            self._nccl.call("ncclCommGetAsyncError", self._handle, ctypes.byref(code))
            self._nccl.check(code.value, "ncclBroadcast")
            if not alive():
                raise NcclError("the generator does not receive")
            time.sleep(POLL_INTERVAL)

    def abort(self) -> None:
        """Leave the group, whatever the others do; may be called again."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._nccl.call("ncclCommAbort", handle)
            self._nccl.give_back_stream(self._stream)

    def _call(self, name: str, *arguments: Any) -> None:
        """A collective on this group's stream."""
        if self._handle is None:
            raise NcclError("the group is dissolved")
        self._nccl.call(name, *arguments, self._handle, self._stream.cuda_stream)
