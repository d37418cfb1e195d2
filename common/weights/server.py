"""Serves the newest snapshot over ZeroMQ: clients come, go and pull when they like."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import zmq

from common.log import get_logger
from common.messages import InvalidMessage, Message
from common.weights.delivery import Client, Delivery
from common.weights.handover import Handover
from common.weights.listener import BindAddress
from common.weights.snapshot import Snapshot
from common.weights.wire import (
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
        folder: where processes of this machine may ask for the snapshots' memory, see `common.weights.handover`.

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
        folder: Path | None = None,
        log: Any = None,
    ) -> None:
        self._log = log or get_logger()
        self._path, self._handler = path, handler
        self._delivery = Delivery(
            address,
            credit,
            encrypts=handler is None,
            call_soon=self.call_soon,
            on_gone=self._forget_client,
            log=self._log,
        )
        self.address, self.sent = self._delivery.main.address, self._delivery.sent
        self.handover = self._handover(folder)
        self._served = ""
        self._calls: deque[Callable[[], None]] = deque()  # from other threads to ours
        self._spare: deque[Snapshot] = deque(maxlen=1)  # dropped, with memory that may serve again
        self._newest: Snapshot | None = None
        self._older: Snapshot | None = None
        self._polling: dict[bytes, str] = {}  # clients that wait for a snapshot newer than the one they have
        self._waiting: dict[int, dict[Client, bool]] = {}  # clients that wait for a chunk of the newest, or its delta
        self._want_deltas: set[bytes] = set()
        self._readers: dict[Client, tuple[str, float]] = {}  # the snapshot each client pulls, and its last request
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

    def spare(self) -> Snapshot | None:
        """A snapshot that nobody reads any more, whose memory may be written to."""
        return self._spare.popleft() if self._spare else None

    def endpoint(self) -> dict[str, str]:
        """What others need to know: the address, its public key or its password, the newest snapshot."""
        listener = self._delivery.main
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

    def reply(self, client: Client, message: Message) -> None:
        """Send a client something; only in the server's thread."""
        self._delivery.send(client, message.pack())

    def close(self) -> None:
        """Stop serving."""
        with self._lock:
            self._closing = True
            os.write(self._wake_out, b"c")
        self._thread.join()
        self._delivery.close()
        if self.handover is not None:
            self.handover.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _handover(self, folder: Path | None) -> Handover | None:
        try:
            return Handover(folder) if folder is not None else None
        except OSError as error:
            self._log.info(
                "weights go over the network on this machine too: no Unix socket can be made in "
                f"learner.weights.shared_folder = {str(folder)!r}",
                reason=error.strerror or str(error),
            )
            return None

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in self._delivery.sockets():
            poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        if self.handover is not None:
            poller.register(self.handover, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(1000 if self._older else None))
            if self._wake_in in ready:
                os.read(self._wake_in, 4096)
                while self._calls:
                    self._calls.popleft()()
            self._answer_all()
            if self.handover is not None:
                self.handover.turn(self.find)
            self._forget_older()

    def _answer_all(self) -> None:
        for client, body in self._delivery.requests():
            try:
                if len(body) != 1:
                    raise InvalidMessage(f"weight request: {len(body)} frames instead of one")
                request = unpack_request(body[0])
                if isinstance(client, bytes):
                    self._answer(client, request)
                elif isinstance(request, Fetch):
                    self._answer_fetch(client, request)
                else:
                    raise InvalidMessage(f"weight request: {request.kind}, where chunks alone are served")
            except InvalidMessage as error:
                self._log.warning("weight request refused", reason=str(error))
                self.reply(client, Refused(reason=str(error)))

    def _answer(self, client: bytes, request: Request) -> None:
        reply = self._handler.answer(self, client, request) if self._handler is not None else None
        if reply is not None:
            self.reply(client, reply)
            return
        if isinstance(request, Hello):
            if client in self._readers:  # of chunks that go another way
                self._readers[client] = (self._readers[client][0], time.monotonic())
            self.reply(client, self._welcome())
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
        self._answer_fetch(client, request)

    def _welcome(self) -> Welcome:
        sealed, handover = self._delivery.sealed, self.handover
        return Welcome(
            path=list(self._path()),
            handover=handover.name if handover is not None else "",
            token=handover.token if handover is not None else "",
            sealed_port=sealed.port if sealed is not None else 0,
            sealed_password=sealed.password if sealed is not None else "",
        )

    def _answer_fetch(self, client: Client, request: Fetch) -> None:
        snapshot = self.find(request.snapshot)
        if snapshot is None:
            self._readers.pop(client, None)
            self.reply(client, Gone(snapshot=request.snapshot))
            return
        if request.chunk >= len(snapshot.chunks):
            raise InvalidMessage(f"weight request: chunk {request.chunk} of {len(snapshot.chunks)}")
        if isinstance(client, bytes):
            self._readers[client] = (request.snapshot, time.monotonic())
        data = snapshot.chunks[request.chunk]
        if data is None:
            self._waiting.setdefault(request.chunk, {})[client] = request.delta
        else:
            self._delivery.send_chunk(client, snapshot, request.chunk, request.delta)

    def _add_chunk(self, snapshot: Snapshot, chunk: int, data: memoryview, delta: memoryview | None) -> None:
        """A chunk has arrived: it goes to all who wait for it."""
        if snapshot is self._newest:
            snapshot.chunks[chunk], snapshot.deltas[chunk] = data, delta
            for client, as_delta in self._waiting.pop(chunk, {}).items():
                self._delivery.send_chunk(client, snapshot, chunk, as_delta)

    def _offer(self, client: bytes) -> None:
        """Answer a waiting poll, if there is something newer than what the client has."""
        if self._newest is None or not supersedes(self._newest.name, self._polling[client]):
            return
        del self._polling[client]
        self._readers[client] = (self._newest.name, time.monotonic())
        self._delivery.send_manifest(client, self._newest)

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

    def _forget_client(self, client: bytes) -> None:
        self._polling.pop(client, None)
        self._readers.pop(client, None)
        self._want_deltas.discard(client)

    def _forget_older(self) -> None:
        now = time.monotonic()
        self._readers = {c: (s, at) for c, (s, at) in self._readers.items() if now - at < READER_TIMEOUT}
        if self._older and not self._is_read(self._older.name):
            self._recycle(self._older)
            self._older = None

    def _is_read(self, name: str) -> bool:
        held = self.handover is not None and self.handover.holds(name)
        return held or any(snapshot == name for snapshot, _ in self._readers.values())

    def _recycle(self, snapshot: Snapshot) -> None:
        """Keep a dropped snapshot's memory for the next, unless ZeroMQ or another process still reads from it."""
        held = self.handover is not None and self.handover.holds(snapshot.name)
        if not self._delivery.reads(snapshot) and snapshot.memory is not None and not held:
            self._spare.append(snapshot)
