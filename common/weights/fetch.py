"""The chunks of one snapshot over one connection: asked for, under way, and unpacked where they come as deltas."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, MutableSet
from concurrent.futures import Future, ThreadPoolExecutor

from common.unpack import Buffer
from common.weights.connection import HELLO_AFTER, Connection, ConnectionLost
from common.weights.delta import WrongDelta, decode, item_bytes
from common.weights.wire import Chunk, Fetch, Gone, Hello, Manifest, checksum

WRONG_MOST = 5  # times that a chunk may arrive with a wrong checksum

Base = Callable[[int], Buffer]  # a chunk of the snapshot that deltas are from


class Fetching:
    """Asks for the missing chunks, at most `credit` ahead, until all are there.

    Deltas are unpacked and verified in a pool's threads. One that gives another chunk than the manifest's is followed
    by a request for the whole chunk: what is handed out is right, whatever came.

    Args:
        missing: chunks to fetch; each leaves it when it has been handed out.
        base: chunks of the manifest's `base`; None: no deltas are asked for.
        pool: unpacks; needed with `base`.
        take: gets each verified chunk as `Receiver.chunk` does, in the caller's thread.

    Attributes:
        received_bytes, delta_chunks, corrupt_chunks: see `TransferStats`.
    """

    def __init__(
        self,
        connection: Connection,
        manifest: Manifest,
        missing: MutableSet[int],
        credit: int,
        base: Base | None,
        pool: ThreadPoolExecutor | None,
        take: Callable[[int, memoryview, memoryview | None], None],
    ) -> None:
        self.received_bytes = self.delta_chunks = self.corrupt_chunks = 0
        self._connection, self._manifest, self._missing, self._credit = connection, manifest, missing, credit
        self._base, self._pool, self._take = base, pool, take
        self._width = item_bytes(manifest)
        self._ahead = deque(sorted(missing))
        self._under_way: set[int] = set()
        self._unpacking: deque[tuple[int, memoryview, Future[memoryview | None]]] = deque()
        self._whole: set[int] = set()  # chunks of which no delta will do
        self._wrong: dict[int, int] = {}

    def run(self) -> bool:
        """Fetch them; False if the server has dropped the snapshot meanwhile. Raises as `ChunkPuller.pull`."""
        connection, timeout = self._connection, self._connection.timeout
        server, name = connection.source.address, self._manifest.snapshot
        arrived = asked = greeted = time.monotonic()
        while self._missing:
            while self._ahead and len(self._under_way) + len(self._unpacking) < self._credit:
                self._ask(self._ahead.popleft())
            if self._unpacking and (not self._under_way or self._unpacking[0][2].done()):
                self._take_unpacked()
                continue
            reply, data = connection.receive()
            now = time.monotonic()
            if isinstance(reply, Gone) and reply.snapshot == name:
                return False
            if isinstance(reply, Chunk) and reply.snapshot == name and reply.chunk in self._under_way:
                arrived = now
                self._under_way.discard(reply.chunk)
                self._arrived(reply, data)
            elif now - arrived > timeout:
                raise ConnectionLost(f"{server} has sent no weights for {timeout:g} s")
            elif now - max(arrived, asked) > timeout / 4:
                asked = now
                for chunk in list(self._under_way):
                    self._ask(chunk)
            elif now - max(arrived, greeted) > HELLO_AFTER:
                greeted = now
                if not connection.send(Hello()):
                    raise ConnectionLost(f"{server} is no longer there")
        return True

    def _ask(self, chunk: int) -> None:
        delta = self._base is not None and chunk not in self._whole
        if not self._connection.send(Fetch(snapshot=self._manifest.snapshot, chunk=chunk, delta=delta)):
            raise ConnectionLost(f"{self._connection.source.address} is not there")
        self._under_way.add(chunk)

    def _arrived(self, reply: Chunk, data: memoryview) -> None:
        self.received_bytes += len(data)
        if not reply.delta:
            if self._is_right(reply.chunk, data):
                self._hand_out(reply.chunk, data, None)
            else:
                self._ask_again(reply.chunk)
        elif self._base is None or reply.chunk in self._whole:
            self._ask_again(reply.chunk)
        else:
            assert self._pool is not None
            self._unpacking.append((reply.chunk, data, self._pool.submit(self._unpack, reply.chunk, data)))

    def _is_right(self, chunk: int, data: memoryview) -> bool:
        start, end = self._manifest.chunk_range(chunk)
        return len(data) == end - start and checksum(data) == self._manifest.checksums[chunk]

    def _unpack(self, chunk: int, delta: memoryview) -> memoryview | None:
        """In a thread of the pool: the chunk of a delta; None where it is not the manifest's chunk."""
        assert self._base is not None
        try:
            data = decode(delta, self._base(chunk), self._width)
        except WrongDelta:
            return None
        return data if self._is_right(chunk, data) else None

    def _take_unpacked(self) -> None:
        """Hand out what was unpacked first, once it is."""
        chunk, delta, unpacked = self._unpacking.popleft()
        data = unpacked.result()
        if data is None:
            self._whole.add(chunk)
            self._ask_again(chunk)
            return
        self.delta_chunks += 1
        self._hand_out(chunk, data, delta)

    def _hand_out(self, chunk: int, data: memoryview, delta: memoryview | None) -> None:
        self._take(chunk, data, delta)
        self._missing.discard(chunk)

    def _ask_again(self, chunk: int) -> None:
        self.corrupt_chunks += 1
        self._wrong[chunk] = self._wrong.get(chunk, 0) + 1
        if self._wrong[chunk] == WRONG_MOST:
            server = self._connection.source.address
            raise ConnectionLost(f"chunk {chunk} of {server} has a wrong checksum every time")
        self._ask(chunk)
