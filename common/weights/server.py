"""Serves the newest snapshot over ZeroMQ: clients come, go and pull when they like."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from common.log import get_logger
from common.messages import InvalidMessage
from common.weights.listener import Listener, Place
from common.weights.snapshot import Snapshot
from common.weights.wire import (
    Chunk,
    Fetch,
    Gone,
    Hello,
    Poll,
    Refused,
    Request,
    Welcome,
    supersedes,
    unpack_request,
)

READER_TIMEOUT = 30.0  # seconds without a request after which a transfer counts as given up
REQUESTS_A_ROUND = 64  # so that a flood of requests does not keep a new version waiting


@dataclass
class Sent:
    """What went out: bytes of weights, and the chunks they made."""

    bytes: int = 0
    chunks: int = 0


class SnapshotServer:
    """One ROUTER socket in a background thread.

    A transfer that began may end: at most one snapshot older than the newest is kept, as long as somebody
    reads it. A snapshot may be served while it arrives; whoever asks for a chunk that is not there yet gets it
    when it is. Chunks are sent from the snapshot's own memory. What cannot be understood is refused; nothing a
    client sends stops the server.

    Args:
        place: where to serve.
        credit: chunks a client may have under way; whoever asks for more is not answered.
        path: ids of the relays from here up to the learner, this one first.

    Attributes:
        sent: counted since the start.

    Raises:
        UserError: see `Listener`.
    """

    def __init__(
        self, place: Place, credit: int, *, path: Callable[[], Sequence[str]] = tuple, log: Any = None
    ) -> None:
        self.sent = Sent()
        self._log = log or get_logger()
        self._path = path
        self._listener = Listener(place, credit + 2)
        self._socket = self._listener.socket
        self.address = self._listener.address
        self._served = ""
        self._orders: deque[Callable[[], None]] = deque()  # from other threads to ours
        self._spare: deque[Any] = deque(maxlen=1)  # memory of a dropped snapshot, handed back
        self._newest: Snapshot | None = None
        self._older: Snapshot | None = None
        self._waiting: dict[bytes, str] = {}
        self._held: dict[int, dict[bytes, None]] = {}  # who waits for a chunk of the newest
        self._readers: dict[bytes, tuple[str, float]] = {}
        self._under_way: dict[str, deque[zmq.MessageTracker]] = {}
        self._closing = False
        self._wake_in, self._wake_out = os.pipe()
        self._thread = threading.Thread(target=self._run, name="weight-server", daemon=True)
        self._thread.start()

    def serve(self, snapshot: Snapshot) -> None:
        """Serve a snapshot from now on. Chunks that it lacks are announced with `arrived`."""
        self._served = snapshot.name
        self._order(partial(self._adopt, snapshot))

    def arrived(self, snapshot: Snapshot, chunk: int, data: memoryview) -> None:
        """A chunk of the snapshot served last is there; its bytes must not change any more."""
        self._order(partial(self._put, snapshot, chunk, data))

    def spare(self) -> Any:
        """Memory of a snapshot that nobody reads any more, or None."""
        return self._spare.popleft() if self._spare else None

    def endpoint(self) -> dict[str, str]:
        """What others need to know: the address, the public key if there is one, the newest snapshot."""
        told = {"address": self.address, "server_key": self._listener.server_key, "snapshot": self._served}
        return {name: value for name, value in told.items() if value}

    def close(self) -> None:
        """Stop serving."""
        self._closing = True
        os.write(self._wake_out, b"c")
        self._thread.join()
        self._listener.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _order(self, act: Callable[[], None]) -> None:
        self._orders.append(act)
        os.write(self._wake_out, b"o")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(1000 if self._older else None))
            if self._wake_in in ready:
                os.read(self._wake_in, 4096)
                while self._orders:
                    self._orders.popleft()()
            if self._socket in ready:
                self._answer_all()
            self._forget_older()

    def _answer_all(self) -> None:
        for _ in range(REQUESTS_A_ROUND):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            client, body = frames[0], frames[1:]
            try:
                if len(body) != 1:
                    raise InvalidMessage(f"weight request: {len(body)} frames instead of one")
                self._answer(client, unpack_request(body[0]))
            except InvalidMessage as error:
                self._log.warning("weight request refused", reason=str(error))
                self._send(client, Refused(reason=str(error)).pack())

    def _answer(self, client: bytes, request: Request) -> None:
        if isinstance(request, Hello):
            self._send(client, Welcome(path=list(self._path())).pack())
            return
        if isinstance(request, Poll):
            self._readers.pop(client, None)
            if self._older:
                self._forget_older()
            self._waiting[client] = request.have
            self._offer(client)
            return
        if not isinstance(request, Fetch):
            raise InvalidMessage(f"weight request: no {request.kind} here, weights go over ZeroMQ")
        snapshot = self._find(request.snapshot)
        if snapshot is None:
            self._readers.pop(client, None)
            self._send(client, Gone(snapshot=request.snapshot).pack())
            return
        if request.chunk >= len(snapshot.chunks):
            raise InvalidMessage(f"weight request: chunk {request.chunk} of {len(snapshot.chunks)}")
        self._readers[client] = (request.snapshot, time.monotonic())
        data = snapshot.chunks[request.chunk]
        if data is None:
            self._held.setdefault(request.chunk, {})[client] = None
        else:
            self._send_chunk(client, snapshot, request.chunk, data)

    def _send_chunk(self, client: bytes, snapshot: Snapshot, chunk: int, data: memoryview) -> None:
        tracker = self._send(client, Chunk(snapshot=snapshot.name, chunk=chunk).pack(), data)
        if tracker is None:
            return
        self.sent.bytes += len(data)
        self.sent.chunks += 1
        if snapshot.memory is not None:
            under_way = self._under_way.setdefault(snapshot.name, deque())
            under_way.append(tracker)
            while under_way and under_way[0].done:
                under_way.popleft()

    def _put(self, snapshot: Snapshot, chunk: int, data: memoryview) -> None:
        """A chunk has arrived: it goes to all who wait for it."""
        if snapshot is self._newest:
            snapshot.chunks[chunk] = data
            for client in self._held.pop(chunk, ()):
                self._send_chunk(client, snapshot, chunk, data)

    def _offer(self, client: bytes) -> None:
        """Answer a waiting poll, if there is something newer than what the client has."""
        if self._newest is None or not supersedes(self._newest.name, self._waiting[client]):
            return
        del self._waiting[client]
        self._readers[client] = (self._newest.name, time.monotonic())
        self._send(client, self._newest.packed_manifest)

    def _adopt(self, snapshot: Snapshot) -> None:
        """Make a snapshot the newest; the one before stays while it is read."""
        self._forget_older()
        if self._newest is not None and not self._newest.complete:
            self._abandon(self._newest)
        # A reader of the older one is closer to its end: it goes first, or slow readers never finish.
        elif self._older is None:
            self._older = self._newest
        elif self._newest is not None:
            self._recycle(self._newest)
        self._newest = snapshot
        self._forget_older()
        for client in list(self._waiting):
            self._offer(client)

    def _abandon(self, snapshot: Snapshot) -> None:
        """The rest of a snapshot will never come: whoever waits for a chunk of it should poll again."""
        for client in {client for clients in self._held.values() for client in clients}:
            self._readers.pop(client, None)
            self._send(client, Gone(snapshot=snapshot.name).pack())
        self._held.clear()

    def _find(self, name: str) -> Snapshot | None:
        for snapshot in (self._newest, self._older):
            if snapshot is not None and snapshot.name == name:
                return snapshot
        return None

    def _forget_older(self) -> None:
        now = time.monotonic()
        self._readers = {c: (s, at) for c, (s, at) in self._readers.items() if now - at < READER_TIMEOUT}
        if self._older and all(s != self._older.name for s, _ in self._readers.values()):
            self._recycle(self._older)
            self._older = None

    def _recycle(self, snapshot: Snapshot) -> None:
        """Keep a dropped snapshot's memory for the next, unless ZeroMQ still reads from it."""
        trackers = self._under_way.pop(snapshot.name, ())
        if snapshot.memory is not None and all(tracker.done for tracker in trackers):
            self._spare.append(snapshot.memory)

    def _send(self, client: bytes, *frames: bytes | memoryview) -> zmq.MessageTracker | None:
        """Answer, or drop the answer if the client left or takes nothing: it will ask again."""
        try:
            return self._socket.send_multipart([client, *frames], zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._waiting.pop(client, None)
                self._readers.pop(client, None)
            elif error.errno != zmq.EAGAIN:
                self._log.warning("weights not sent", reason=str(error))
            return None
