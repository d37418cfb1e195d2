"""Serves the newest snapshot over ZeroMQ: clients come, go and pull when they like."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import zmq

from common.log import get_logger
from common.messages import InvalidMessage, Message
from common.weights.listener import BindAddress, Listener
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
class SentStats:
    """What went out: bytes of weights, and the chunks they made."""

    bytes: int = 0
    chunks: int = 0


class Handler(Protocol):
    """Answers requests that a server of chunks does not know."""

    def answer(self, server: SnapshotServer, client: bytes, request: Request) -> Message | None:
        """The reply to a request, in the server's thread; None: the server is to answer it.

        Raises:
            InvalidMessage: the request is refused with this reason.
        """
        ...


class SnapshotServer:
    """One ROUTER socket in a background thread.

    A transfer that began may end: at most one snapshot older than the newest is kept, as long as somebody
    reads it. A snapshot may be served while it arrives; whoever asks for a chunk that is not there yet gets it
    when it is. Chunks are sent from the snapshot's own memory, or as deltas to those who ask for these. What cannot
    be understood is refused; nothing a client sends stops the server.

    Args:
        address: where to serve.
        credit: chunks a client may have under way; whoever asks for more is not answered.
        path: ids of the relays from here up to the learner, this one first.
        handler: is given each request first.

    Attributes:
        address: what clients connect to.
        sent: counted since the start.

    Raises:
        UserError: see `Listener`.
    """

    def __init__(
        self,
        address: BindAddress,
        credit: int,
        *,
        path: Callable[[], Sequence[str]] = tuple,
        handler: Handler | None = None,
        log: Any = None,
    ) -> None:
        self.sent = SentStats()
        self._log = log or get_logger()
        self._path, self._handler = path, handler
        self._listener = Listener(address, credit + 2)
        self._socket = self._listener.socket
        self.address = self._listener.address
        self._served = ""
        self._calls: deque[Callable[[], None]] = deque()  # from other threads to ours
        self._spare: deque[Any] = deque(maxlen=1)  # memory of a dropped snapshot, handed back
        self._newest: Snapshot | None = None
        self._older: Snapshot | None = None
        self._polling: dict[bytes, str] = {}  # clients that wait for a snapshot newer than the one they have
        self._waiting: dict[int, dict[bytes, bool]] = {}  # clients that wait for a chunk of the newest, or its delta
        self._want_deltas: set[bytes] = set()
        self._readers: dict[bytes, tuple[str, float]] = {}  # the snapshot each client pulls, and its last request
        self._under_way: dict[str, deque[zmq.MessageTracker]] = {}
        self._lock = threading.Lock()  # over closing, after which nobody may write to the pipe
        self._closing = False
        self._wake_in, self._wake_out = os.pipe()
        self._thread = threading.Thread(target=self._run, name="weight-server", daemon=True)
        self._thread.start()

    def serve(self, snapshot: Snapshot) -> None:
        """Serve a snapshot from now on. Chunks that it lacks are announced with `arrived`."""
        self._served = snapshot.name
        self.call_soon(partial(self._set_newest, snapshot))

    def arrived(self, snapshot: Snapshot, chunk: int, data: memoryview, delta: memoryview | None = None) -> None:
        """A chunk of the snapshot served last is there, and maybe its delta; its bytes must not change any more."""
        self.call_soon(partial(self._add_chunk, snapshot, chunk, data, delta))

    @property
    def deltas_wanted(self) -> bool:
        """Whether a client that is there, or was until lately, would take the next snapshot as deltas."""
        return bool(self._want_deltas)

    def spare(self) -> Any:
        """Memory of a snapshot that nobody reads any more, or None."""
        return self._spare.popleft() if self._spare else None

    def endpoint(self) -> dict[str, str]:
        """What others need to know: the address, its public key or its password, the newest snapshot."""
        listener = self._listener
        endpoint = {
            "address": self.address,
            "server_key": listener.server_key,
            "password": listener.password,
            "snapshot": self._served,
        }
        return {name: value for name, value in endpoint.items() if value}

    def call_soon(self, act: Callable[[], None]) -> None:
        """Have the server's thread do something, unless it is closed; may be called in any thread."""
        with self._lock:
            if not self._closing:
                self._calls.append(act)
                os.write(self._wake_out, b"c")

    def find(self, name: str) -> Snapshot | None:
        """The snapshot of that name, if it is still served; only in the server's thread."""
        for snapshot in (self._newest, self._older):
            if snapshot is not None and snapshot.name == name:
                return snapshot
        return None

    def reply(self, client: bytes, message: Message) -> None:
        """Send a client something; only in the server's thread."""
        self._send(client, message.pack())

    def close(self) -> None:
        """Stop serving."""
        with self._lock:
            self._closing = True
            os.write(self._wake_out, b"c")
        self._thread.join()
        self._listener.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(1000 if self._older else None))
            if self._wake_in in ready:
                os.read(self._wake_in, 4096)
                while self._calls:
                    self._calls.popleft()()
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
                self.reply(client, Refused(reason=str(error)))

    def _answer(self, client: bytes, request: Request) -> None:
        reply = self._handler.answer(self, client, request) if self._handler is not None else None
        if reply is not None:
            self.reply(client, reply)
            return
        if isinstance(request, Hello):
            self.reply(client, Welcome(path=list(self._path())))
            return
        if isinstance(request, Poll):
            self._readers.pop(client, None)
            if self._older:
                self._forget_older()
            self._polling[client] = request.have
            (self._want_deltas.add if request.deltas else self._want_deltas.discard)(client)
            self._offer(client)
            return
        if not isinstance(request, Fetch):
            raise InvalidMessage(f"weight request: no {request.kind} here, weights go over ZeroMQ")
        snapshot = self.find(request.snapshot)
        if snapshot is None:
            self._readers.pop(client, None)
            self.reply(client, Gone(snapshot=request.snapshot))
            return
        if request.chunk >= len(snapshot.chunks):
            raise InvalidMessage(f"weight request: chunk {request.chunk} of {len(snapshot.chunks)}")
        self._readers[client] = (request.snapshot, time.monotonic())
        data = snapshot.chunks[request.chunk]
        if data is None:
            self._waiting.setdefault(request.chunk, {})[client] = request.delta
        else:
            self._send_chunk(client, snapshot, request.chunk, request.delta)

    def _send_chunk(self, client: bytes, snapshot: Snapshot, chunk: int, as_delta: bool) -> None:
        data = snapshot.chunks[chunk]
        assert data is not None
        if as_delta := as_delta and snapshot.deltas[chunk] is not None:
            data = snapshot.deltas[chunk]
            assert data is not None
        # Counted first, so that a client that has the chunk also finds it counted.
        self.sent.bytes += len(data)
        self.sent.chunks += 1
        tracker = self._send(client, Chunk(snapshot=snapshot.name, chunk=chunk, delta=as_delta).pack(), data)
        if tracker is None:
            self.sent.bytes -= len(data)
            self.sent.chunks -= 1
            return
        if snapshot.memory is not None and not as_delta:
            under_way = self._under_way.setdefault(snapshot.name, deque())
            under_way.append(tracker)
            while under_way and under_way[0].done:
                under_way.popleft()

    def _add_chunk(self, snapshot: Snapshot, chunk: int, data: memoryview, delta: memoryview | None) -> None:
        """A chunk has arrived: it goes to all who wait for it."""
        if snapshot is self._newest:
            snapshot.chunks[chunk], snapshot.deltas[chunk] = data, delta
            for client, as_delta in self._waiting.pop(chunk, {}).items():
                self._send_chunk(client, snapshot, chunk, as_delta)

    def _offer(self, client: bytes) -> None:
        """Answer a waiting poll, if there is something newer than what the client has."""
        if self._newest is None or not supersedes(self._newest.name, self._polling[client]):
            return
        del self._polling[client]
        self._readers[client] = (self._newest.name, time.monotonic())
        self._send(client, self._newest.packed_manifest)

    def _set_newest(self, snapshot: Snapshot) -> None:
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
        for client in list(self._polling):
            self._offer(client)
        self._want_deltas &= self._polling.keys() | self._readers.keys()

    def _abandon(self, snapshot: Snapshot) -> None:
        """The rest of a snapshot will never come: whoever waits for a chunk of it should poll again."""
        for client in {client for clients in self._waiting.values() for client in clients}:
            self._readers.pop(client, None)
            self.reply(client, Gone(snapshot=snapshot.name))
        self._waiting.clear()

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
                self._polling.pop(client, None)
                self._readers.pop(client, None)
                self._want_deltas.discard(client)
            elif error.errno != zmq.EAGAIN:
                self._log.warning("weights not sent", reason=str(error))
            return None
