"""A group of its own for each generator: the learner's rank 0 and that generator's workers.

Not one group for all: whoever came or went would make all of them meet anew, and one that hangs would hold up the rest.
So joins, departures and failures concern one generator each, at the price of a copy over the learner's network for
each of them.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from common.weights.snapshot import Snapshot
from common.weights.wire import ITEM_SIZE, Manifest
from learner.nccl import Communicator, Nccl, NcclFailed

BUFFER_BYTES = 256 << 20  # on the learner's GPU for each group, and twice in each worker
SILENCE = 20.0  # seconds without a word from a generator after which its group is dissolved
TICK = 1.0


class Groups:
    """Groups by client. `join` and `send` return at once; the work is done in a thread for each group.

    Args:
        nccl: makes groups.
        on_end: told of a group that ended by itself: its client, and why.
        silence: see `SILENCE`.
    """

    def __init__(self, nccl: Nccl, on_end: Callable[[bytes, str], None], log: Any, *, silence: float = SILENCE) -> None:
        self._nccl, self._on_end, self._log, self._silence = nccl, on_end, log, silence
        self._groups: dict[bytes, _Group] = {}
        self._lock = threading.Lock()

    def join(self, client: bytes, workers: int) -> bytes:
        """Begin a group with a generator's workers; one that it had is left. Returns the id to meet by.

        Raises:
            NcclFailed: NCCL gives none.
        """
        unique_id = self._nccl.unique_id()
        self.leave(client)
        group = _Group(self._nccl, unique_id, workers + 1, self._silence, lambda reason: self._ended(client, reason))
        with self._lock:
            self._groups[client] = group
        group.start()
        return unique_id

    def send(self, client: bytes, snapshot: Snapshot) -> bool:
        """Broadcast a snapshot, which must be whole, to a client's group; False if there is none."""
        with self._lock:
            group = self._groups.get(client)
        return group is not None and group.send(snapshot)

    def heard(self, client: bytes) -> None:
        """A client lives."""
        with self._lock:
            group = self._groups.get(client)
        if group is not None:
            group.heard = time.monotonic()

    def reads(self, memory: Any) -> bool:
        """Whether a snapshot in this memory is being sent, so that it must not change."""
        with self._lock:
            return any(group.reads(memory) for group in self._groups.values())

    def leave(self, client: bytes) -> None:
        """End a client's group, if it has one."""
        with self._lock:
            group = self._groups.pop(client, None)
        if group is not None:
            group.end()

    def close(self) -> None:
        """End all groups."""
        for client in list(self._groups):
            self.leave(client)

    def _ended(self, client: bytes, reason: str) -> None:
        with self._lock:
            self._groups.pop(client, None)
        self._log.warning("a generator's NCCL group ended", reason=reason)
        self._on_end(client, reason)


class _Group(threading.Thread):
    """Joins, then sends what it is told to, until told to end or until something fails."""

    def __init__(
        self, nccl: Nccl, unique_id: bytes, size: int, silence: float, on_failure: Callable[[str], None]
    ) -> None:
        # Joining waits for the others, and cannot be called off: it must not keep the learner from ending.
        super().__init__(name="nccl-group", daemon=True)
        self.heard = time.monotonic()
        self._nccl, self._id, self._size = nccl, unique_id, size
        self._silence, self._on_failure = silence, on_failure
        self._todo: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._held: list[Snapshot] = []  # waiting to be sent, or being sent
        self._ending = False

    def send(self, snapshot: Snapshot) -> bool:
        if self._ending:
            return False
        self._held.append(snapshot)
        self._todo.put(snapshot)
        return True

    def reads(self, memory: Any) -> bool:
        return memory is not None and any(snapshot.memory is memory for snapshot in tuple(self._held))

    def end(self) -> None:
        self._ending = True
        self._todo.put(None)

    def run(self) -> None:
        communicator: Communicator | None = None
        try:
            communicator = self._nccl.join(self._id, self._size)
            self._serve(communicator)
        except Exception as error:  # whatever a driver may raise: it must not pass for a group that works
            if not self._ending:
                self._ending = True
                self._on_failure(str(error) or type(error).__name__)
        finally:
            self._held.clear()
            if communicator is not None:
                communicator.abort()

    def _serve(self, communicator: Communicator) -> None:
        while not self._ending:
            try:
                snapshot = self._todo.get(timeout=min(TICK, self._silence / 4))
            except queue.Empty:
                if not self._alive():
                    raise NcclFailed(f"the generator has been silent for {self._silence:g} s") from None
                continue
            if snapshot is None:
                return
            for pieces in packed(snapshot):
                communicator.broadcast(pieces, self._alive)
            self._held.remove(snapshot)

    def _alive(self) -> bool:
        return not self._ending and time.monotonic() - self.heard < self._silence


def packed(snapshot: Snapshot, limit: int = BUFFER_BYTES) -> Iterator[list[torch.Tensor]]:
    """A snapshot's tensors as bytes, uint8 [N_i], buffer by buffer, cut where vLLM's receiving side cuts them.

    That is `packed_nccl_broadcast_consumer`: a buffer is full as soon as it holds more than `limit` bytes, and a tensor
    is never cut.
    """
    memory: torch.Tensor = snapshot.memory
    pieces: list[torch.Tensor] = []
    size = 0
    for offset, count in _places(snapshot.manifest):
        pieces.append(memory[offset : offset + count])
        size += count
        if size > limit:
            yield pieces
            pieces, size = [], 0
    if pieces:
        yield pieces


def _places(manifest: Manifest) -> Iterator[tuple[int, int]]:
    """First byte of each tensor, and how many it has."""
    for offset, dtype, shape in zip(manifest.offsets, manifest.dtypes, manifest.shapes, strict=True):
        yield offset, ITEM_SIZE[dtype] * math.prod(shape)
