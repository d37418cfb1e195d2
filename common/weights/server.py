"""Serves the newest snapshot over ZeroMQ: clients connect, pull and leave at any time."""

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

from common.config import WeightsConfig
from common.log import get_logger
from common.messages import InvalidMessage
from common.weights.handover import Handover, shared_folder
from common.weights.listener import Listener
from common.weights.memory import Snapshot
from common.weights.wire import (
    CREDIT,
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
    """Bytes and chunks of weights that were sent."""

    bytes: int = 0
    chunks: int = 0


class SnapshotServer:
    """One ROUTER socket in a background thread.

    A transfer that has begun can finish: at most one snapshot older than the newest is kept, while a client reads it. A
    snapshot may be served while it arrives; a missing chunk is sent once it is there. Chunks are sent from the
    snapshot's own memory, or as deltas to clients that ask for these. A request that cannot be understood is refused;
    nothing a client sends stops the server.

    Args:
        config: where to serve, the keys, and the folder in which processes of this machine ask for the snapshots'
            memory (`common.weights.handover`).
        option: the setting or option that gave the address to serve at, for messages.
        path: ids of the relays from here up to the learner, this one first.

    Attributes:
        address: what clients connect to.
        sent: counts since the start.

    Raises:
        UserError: see `Listener`.
    """

    def __init__(
        self,
        config: WeightsConfig,
        *,
        option: str = "learner.weights.bind",
        path: Callable[[], Sequence[str]] = tuple,
        log: Any = None,
    ) -> None:
        self._log = log or get_logger()
        self._path = path
        # ZeroMQ counts messages as read in steps of half its limit. With twice the credit, the queue is never taken for
        # full, so no answer to a client's requests is dropped.
        self._listener = Listener(config, option, 2 * (CREDIT + 2))
        self._socket, self._strangers = self._listener.socket, self._listener.strangers
        self.address, self.sent = self._listener.address, SentStats()
        self.handover = self._handover(config)
        self._served = ""
        self._calls: deque[Callable[[], None]] = deque()  # from other threads to ours
        self._spare: deque[Snapshot] = deque(maxlen=1)  # dropped, with memory that may serve again
        self._newest: Snapshot | None = None
        self._older: Snapshot | None = None
        self._under_way: dict[str, deque[zmq.MessageTracker]] = {}  # messages that ZeroMQ may still read, by snapshot
        self._polling: dict[bytes, str] = {}  # clients that wait for a snapshot newer than the one they have
        self._waiting: dict[int, dict[bytes, bool]] = {}  # clients that wait for a chunk of the newest, or its delta
        self._want_deltas: set[bytes] = set()
        self._readers: dict[bytes, tuple[str, float]] = {}  # the snapshot each client pulls, and its last request
        self._lock = threading.Lock()  # for closing, after which nothing may be written to the pipe
        self._closing = False
        self._wake_in, self._wake_out = os.pipe()
        self._thread = threading.Thread(target=self._run, name="weight-server", daemon=True)
        self._thread.start()

    def serve(self, snapshot: Snapshot) -> None:
        """Serve a snapshot from now on. Missing chunks are added by `arrived`."""
        self._served = snapshot.name
        self._call_soon(partial(self._set_newest, snapshot))

    def arrived(self, snapshot: Snapshot, chunk: int, data: memoryview, delta: memoryview | None = None) -> None:
        """Send a chunk of the newest snapshot, or its delta, from now on; its bytes must not change any more."""
        self._call_soon(partial(self._add_chunk, snapshot, chunk, data, delta))

    @property
    def deltas_wanted(self) -> bool:
        """True if a client that is connected, or was until lately, would take the next snapshot as deltas."""
        return bool(self._want_deltas)

    def spare(self) -> Snapshot | None:
        """A snapshot that nothing reads any more, whose memory may be written to."""
        return self._spare.popleft() if self._spare else None

    def endpoint(self) -> dict[str, str]:
        """What others need to connect: the address and its public key or password; and the newest snapshot's name."""
        endpoint = {
            "address": self.address,
            "server_key": self._listener.server_key,
            "password": self._listener.password,
            "snapshot": self._served,
        }
        return {name: value for name, value in endpoint.items() if value}

    def close(self) -> None:
        with self._lock:
            self._closing = True
            os.write(self._wake_out, b"c")
        self._thread.join()
        self._listener.close()
        if self.handover is not None:
            self.handover.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _handover(self, config: WeightsConfig) -> Handover | None:
        folder = shared_folder(config)
        try:
            return Handover(folder) if folder is not None else None
        except OSError as error:
            self._log.info(
                "weights go over the network on this machine too: no Unix socket can be made in "
                f"learner.weights.shared_folder = {str(folder)!r}",
                reason=error.strerror or str(error),
            )
            return None

    def _call_soon(self, act: Callable[[], None]) -> None:
        """Have the server's thread do something, unless it is closed; may be called in any thread."""
        with self._lock:
            if not self._closing:
                self._calls.append(act)
                os.write(self._wake_out, b"c")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._strangers.events, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        if self.handover is not None:
            poller.register(self.handover, zmq.POLLIN)
        while not self._closing:
            # While an older snapshot is kept, wake up to notice that its readers have timed out.
            ready = dict(poller.poll(1000 if self._older else None))
            if self._wake_in in ready:
                os.read(self._wake_in, 4096)
                while self._calls:
                    self._calls.popleft()()
            self._strangers.turn()
            self._answer_all()
            if self.handover is not None:
                self.handover.turn(self._find)
            self._forget_older()

    def _answer_all(self) -> None:
        for _ in range(REQUESTS_A_ROUND):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            client, *body = (frame.bytes for frame in frames)
            self._strangers.admit(frames[-1])
            try:
                if len(body) != 1:
                    raise InvalidMessage(f"weight request: {len(body)} frames instead of one")
                self._answer(client, unpack_request(body[0]))
            except InvalidMessage as error:
                self._log.warning("weight request refused", reason=str(error))
                self._send(client, Refused(reason=str(error)).pack())

    def _answer(self, client: bytes, request: Request) -> None:
        match request:
            case Hello():
                if client in self._readers:  # it still reads, though maybe from shared memory
                    self._readers[client] = (self._readers[client][0], time.monotonic())
                name, token = (self.handover.name, self.handover.token) if self.handover is not None else ("", "")
                self._send(client, Welcome(path=list(self._path()), handover=name, token=token).pack())
            case Poll():
                self._readers.pop(client, None)
                if self._older:
                    self._forget_older()
                self._polling[client] = request.have
                (self._want_deltas.add if request.deltas else self._want_deltas.discard)(client)
                self._offer(client)
            case Fetch():
                self._answer_fetch(client, request)

    def _answer_fetch(self, client: bytes, request: Fetch) -> None:
        snapshot = self._find(request.snapshot)
        if snapshot is None:
            self._readers.pop(client, None)
            self._send(client, Gone(snapshot=request.snapshot).pack())
            return
        if request.chunk >= len(snapshot.chunks):
            raise InvalidMessage(f"weight request: chunk {request.chunk} of {len(snapshot.chunks)}")
        self._readers[client] = (request.snapshot, time.monotonic())
        if snapshot.chunks[request.chunk] is None:
            self._waiting.setdefault(request.chunk, {})[client] = request.delta
        else:
            self._send_chunk(client, snapshot, request.chunk, request.delta)

    def _find(self, name: str) -> Snapshot | None:
        return next((one for one in (self._newest, self._older) if one is not None and one.name == name), None)

    def _add_chunk(self, snapshot: Snapshot, chunk: int, data: memoryview, delta: memoryview | None) -> None:
        """Add a chunk that has arrived, and send it to all clients that wait for it."""
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

    def _send_chunk(self, client: bytes, snapshot: Snapshot, chunk: int, as_delta: bool) -> None:
        """Send a chunk that is there, or its delta if there is one."""
        delta = snapshot.deltas[chunk] if as_delta else None
        data = delta if delta is not None else snapshot.chunks[chunk]
        assert data is not None
        header = Chunk(snapshot=snapshot.name, chunk=chunk, delta=delta is not None)
        # Counted first, so that a client that has the chunk also finds it counted.
        self.sent.bytes += len(data)
        self.sent.chunks += 1
        tracker = self._send(client, header.pack(), data)
        if tracker is None:
            self.sent.bytes -= len(data)
            self.sent.chunks -= 1
        elif delta is None:  # deltas lie outside the snapshot's memory; only whole chunks keep it from being reused
            under_way = self._under_way.setdefault(snapshot.name, deque())
            under_way.append(tracker)
            while under_way and under_way[0].done:
                under_way.popleft()

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

    def _set_newest(self, snapshot: Snapshot) -> None:
        """Make a snapshot the newest; the previous one is kept while clients read it."""
        self._forget_older()
        if self._newest is not None and not self._newest.complete:
            self._abandon(self._newest)
        # Keep the older one: its readers are closer to the end, and slow clients would otherwise never finish a
        # transfer.
        elif self._older is None:
            self._older = self._newest
        elif self._newest is not None:
            self._recycle(self._newest)
        self._newest = snapshot
        self._forget_older()
        for client in list(self._polling):
            self._offer(client)
        # Forget clients that left without a word, so that no deltas are made for them.
        self._want_deltas &= self._polling.keys() | self._readers.keys()

    def _abandon(self, snapshot: Snapshot) -> None:
        """Have clients that wait for a chunk of a snapshot poll again: the rest of it will never come."""
        for client in {client for clients in self._waiting.values() for client in clients}:
            self._readers.pop(client, None)
            self._send(client, Gone(snapshot=snapshot.name).pack())
        self._waiting.clear()

    def _forget_older(self) -> None:
        """Drop the older snapshot once no client reads it."""
        now = time.monotonic()
        self._readers = {c: (s, at) for c, (s, at) in self._readers.items() if now - at < READER_TIMEOUT}
        if self._older is None:
            return
        name = self._older.name
        if not self._is_held(name) and all(snapshot != name for snapshot, _ in self._readers.values()):
            self._recycle(self._older)
            self._older = None

    def _is_held(self, name: str) -> bool:
        return self.handover is not None and self.handover.holds(name)

    def _recycle(self, snapshot: Snapshot) -> None:
        """Keep a dropped snapshot's memory for the next, unless ZeroMQ or another process still reads from it."""
        trackers = self._under_way.pop(snapshot.name, ())
        is_read = self._is_held(snapshot.name) or not all(tracker.done for tracker in trackers)
        if not is_read:
            self._spare.append(snapshot)
