"""The sockets of a weight server: requests come in, replies and chunks go out, encrypted where there are keys."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import zmq

from common.weights.listener import BindAddress, Listener
from common.weights.sealing import TAG_BYTES, Sealer
from common.weights.snapshot import Snapshot
from common.weights.wire import Chunk

REQUESTS_A_ROUND = 64  # so that a flood of requests does not keep a new version waiting
SEALED = "sealed"
Client = bytes | tuple[str, bytes]  # by its connection; of the socket for encrypted chunks, the second


@dataclass
class SentStats:
    """What went out: bytes of weights, and the chunks they made."""

    bytes: int = 0
    chunks: int = 0


class Delivery:
    """Used by one thread.

    Args:
        credit: chunks a client may have under way.
        encrypts: chunks get a socket of their own, where there are keys.
        call_soon: has the thread do something; called in others.
        on_gone: told of a client that is no longer there.

    Attributes:
        main: the listener for all but encrypted chunks.
        sealed: that for encrypted chunks, if there is one.
        sent: counted since the start.

    Raises:
        UserError: see `Listener`.
    """

    def __init__(
        self,
        address: BindAddress,
        credit: int,
        *,
        encrypts: bool,
        call_soon: Callable[[Callable[[], None]], None],
        on_gone: Callable[[bytes], None],
        log: Any,
    ) -> None:
        self.sent = SentStats()
        self._call_soon, self._on_gone, self._log = call_soon, on_gone, log
        self._sealer = Sealer()
        self._under_way: dict[str, deque[zmq.MessageTracker]] = {}
        # ZeroMQ learns that messages were read after half of its limit only: with less, some of the credit get lost.
        limit = 2 * (credit + 2)
        self.main = Listener(address, limit)
        self.sealed: Listener | None = None
        try:
            if encrypts and address.curve_dir is not None:
                self.sealed = Listener(address.sealed, limit, sealed=True)
        except BaseException:
            self.main.close()
            raise

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """To wait at."""
        return [self.main.socket] + ([self.sealed.socket] if self.sealed is not None else [])

    def requests(self) -> Iterator[tuple[Client, list[bytes]]]:
        """What has come, a limited number at a time."""
        for socket in self.sockets():
            for _ in range(REQUESTS_A_ROUND):
                try:
                    client, *body = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                yield client if socket is self.main.socket else (SEALED, client), body

    def send_manifest(self, client: Client, snapshot: Snapshot) -> None:
        """Offer a snapshot, with its key where chunks are encrypted under it."""
        self.send(client, snapshot.packed_manifest, *([snapshot.key] if self.sealed is not None else []))

    def send_chunk(self, client: Client, snapshot: Snapshot, chunk: int, as_delta: bool) -> None:
        """Send a chunk that is there, or its delta if there is one."""
        delta = snapshot.deltas[chunk] if as_delta else None
        data = delta if delta is not None else snapshot.chunks[chunk]
        assert data is not None
        header = Chunk(snapshot=snapshot.name, chunk=chunk, delta=delta is not None)
        if not isinstance(client, bytes):
            snapshot.sealing += 1
            self._sealer.submit(
                snapshot.seal,
                header,
                data,
                lambda ciphertext: self._call_soon(partial(self._send_sealed, client, snapshot, header, ciphertext)),
            )
            return
        tracker = self._send_counted(client, header, data, len(data))
        if tracker is not None and snapshot.memory is not None and delta is None:
            under_way = self._under_way.setdefault(snapshot.name, deque())
            under_way.append(tracker)
            while under_way and under_way[0].done:
                under_way.popleft()

    def reads(self, snapshot: Snapshot) -> bool:
        """Whether bytes of a snapshot that was dropped are still on their way; asked once."""
        trackers = self._under_way.pop(snapshot.name, ())
        # What is being encrypted must not change: under one key a nonce stands for one plaintext.
        return snapshot.sealing > 0 or not all(tracker.done for tracker in trackers)

    def send(self, client: Client, *frames: bytes | memoryview) -> zmq.MessageTracker | None:
        """Answer, or drop the answer if the client left or takes nothing: it will ask again."""
        listener, identity = (self.main, client) if isinstance(client, bytes) else (self.sealed, client[1])
        assert listener is not None
        try:
            return listener.socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                if isinstance(client, bytes):
                    self._on_gone(client)
            elif error.errno != zmq.EAGAIN:
                self._log.warning("weights not sent", reason=str(error))
            return None

    def close(self) -> None:
        """Stop listening."""
        self._sealer.close()
        self.main.close()
        if self.sealed is not None:
            self.sealed.close()

    def _send_sealed(self, client: Client, snapshot: Snapshot, header: Chunk, ciphertext: np.ndarray) -> None:
        snapshot.sealing -= 1
        tracker = self._send_counted(client, header, ciphertext.data, len(ciphertext) - TAG_BYTES)
        if tracker is not None:
            self._sealer.sent(tracker, ciphertext)

    def _send_counted(self, client: Client, header: Chunk, data: memoryview, size: int) -> zmq.MessageTracker | None:
        # Counted first, so that a client that has the chunk also finds it counted.
        self.sent.bytes += size
        self.sent.chunks += 1
        tracker = self.send(client, header.pack(), data)
        if tracker is None:
            self.sent.bytes -= size
            self.sent.chunks -= 1
        return tracker
