"""A group of its own for each generator: the learner's rank 0 and that generator's workers.

There is no single group for all: whenever a generator started or stopped, all would have to form it again, and one that
hangs would delay the others. So joins, departures and failures concern one generator each, at the price of a copy over
the learner's network for each of them. What NCCL does is behind `learner.nccl`; nothing here depends on it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from common.messages import InvalidMessage, Message
from common.weights.server import SnapshotServer
from common.weights.snapshot import Snapshot
from common.weights.wire import Dissolved, Fetch, Gone, Group, Join, Receive, Request, Sending
from learner.nccl import Communicator, Nccl, NcclError
from learner.staging import Staging

PIECE_BYTES = 64 << 20  # of one broadcast; what a worker needs for receiving, beside one tensor
SILENCE = 20.0  # seconds without a message from a generator after which its group is dissolved


class NcclGroups:
    """Broadcasts snapshots to generators that ask for them: the `handler` of a `SnapshotServer`.

    The server's thread alone adds and removes groups; joining and broadcasting is done in a thread for each group.

    Args:
        nccl: makes groups.
    """

    def __init__(self, nccl: Nccl, log: Any) -> None:
        self._nccl, self._log = nccl, log
        self._groups: dict[bytes, _GroupThread] = {}
        self._staging = Staging(PIECE_BYTES, nccl.device)

    def answer(self, server: SnapshotServer, client: bytes, request: Request) -> Message | None:
        """See `common.weights.server.Handler`."""
        group = self._groups.get(client)
        if group is not None:
            group.heard = time.monotonic()
        match request:
            case Fetch():
                raise InvalidMessage("weight request: learner.weights.backend is nccl here, nothing is fetched")
            case Join(workers=workers):
                return self._join(server, client, workers)
            case Receive(snapshot=name):
                snapshot = server.find(name)
                if snapshot is None:
                    return Gone(snapshot=name)
                if group is None or not group.send(snapshot):
                    return Dissolved(reason="you are in no group")
                server.sent.bytes += snapshot.manifest.total_bytes
                server.sent.chunks += len(snapshot.chunks)
                return Sending(snapshot=name)
        return None

    def reads(self, memory: Any) -> bool:
        """Whether a snapshot in this memory is being sent, so that it must not change."""
        return any(group.reads(memory) for group in list(self._groups.values()))

    def close(self) -> None:
        """End all groups; the server is closed already."""
        for group in self._groups.values():
            group.end()

    def _join(self, server: SnapshotServer, client: bytes, workers: int) -> Message:
        """Begin a group with a generator's workers; one that it had is left."""
        try:
            unique_id = self._nccl.unique_id()
        except NcclError as error:
            return Dissolved(reason=str(error))
        if client in self._groups:
            self._groups.pop(client).end()

        def failed(reason: str) -> None:
            server.call_soon(lambda: self._remove(server, client, group, reason))

        group = _GroupThread(lambda: self._nccl.join(unique_id, workers + 1), self._staging, failed)
        self._groups[client] = group
        group.start()
        return Group(unique_id=unique_id, buffer_bytes=PIECE_BYTES)

    def _remove(self, server: SnapshotServer, client: bytes, group: _GroupThread, reason: str) -> None:
        """A group has ended by itself: tell its generator."""
        if self._groups.get(client) is group:
            del self._groups[client]
            self._log.warning("a generator's NCCL group ended", reason=reason)
            server.reply(client, Dissolved(reason=reason))


class _GroupThread(threading.Thread):
    """Joins, then sends what it is given, until it is ended or something fails."""

    def __init__(self, join: Callable[[], Communicator], staging: Staging, on_failure: Callable[[str], None]) -> None:
        # Joining waits for the others, and cannot be called off: it must not keep the learner from ending.
        super().__init__(name="nccl-group", daemon=True)
        self.heard = time.monotonic()
        self._join, self._silence, self._on_failure = join, SILENCE, on_failure
        self._staging = staging
        self._buffer: torch.Tensor | None = None  # while a snapshot is sent
        self._queue: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._unsent: list[Snapshot] = []  # waiting to be sent, or being sent
        self._ending = False

    def send(self, snapshot: Snapshot) -> bool:
        """Broadcast a snapshot, which must be whole; False if the group has ended."""
        if not self._ending:
            self._unsent.append(snapshot)
            self._queue.put(snapshot)
        return not self._ending

    def reads(self, memory: Any) -> bool:
        return memory is not None and any(snapshot.memory is memory for snapshot in tuple(self._unsent))

    def end(self) -> None:
        self._ending = True
        self._queue.put(None)

    def run(self) -> None:
        communicator: Communicator | None = None
        try:
            communicator = self._join()
            self._send_all(communicator)
        except Exception as error:  # whatever a driver may raise: it must not pass for a group that works
            if not self._ending:
                self._ending = True
                self._on_failure(str(error) or type(error).__name__)
        finally:
            self._unsent.clear()
            # An abort may hang as the broadcast did: whatever others wait for is given up before.
            if self._buffer is not None:
                self._staging.replace(self._buffer)
            if communicator is not None:
                communicator.abort()

    def _send_all(self, communicator: Communicator) -> None:
        while not self._ending:
            try:
                snapshot = self._queue.get(timeout=self._silence / 4)
            except queue.Empty:
                if not self._alive():
                    raise NcclError(f"the generator has been silent for {self._silence:g} s") from None
                continue
            if snapshot is None:
                return
            self._buffer = self._staging.take(self._alive)
            if self._buffer is None:
                continue
            for piece in pieces(snapshot, len(self._buffer)):
                communicator.broadcast(piece, self._buffer, self._alive)
            self._staging.give_back(self._buffer)
            self._buffer = None
            self._unsent.remove(snapshot)

    def _alive(self) -> bool:
        return not self._ending and time.monotonic() - self.heard < self._silence


def pieces(snapshot: Snapshot, size: int) -> Iterator[torch.Tensor]:
    """All bytes of a snapshot's memory, in order, uint8 [size] each and the last shorter: tensors are cut anywhere."""
    memory: torch.Tensor = snapshot.memory.data
    yield from memory[: snapshot.manifest.total_bytes].split(size)
