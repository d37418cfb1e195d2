"""The chunks of one snapshot over one connection: asked for, under way, and unpacked where they come as deltas."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, MutableSet
from concurrent.futures import Future, ThreadPoolExecutor

from common.unpack import Buffer
from common.weights.connection import HELLO_AFTER, Connection, ConnectionLost
from common.weights.delta import WrongDelta, decode, item_bytes
from common.weights.sealing import WrongSeal
from common.weights.wire import Chunk, Fetch, Gone, Hello, Manifest, checksum

WRONG_MOST = 5  # times that a chunk may arrive with a wrong checksum

Base = Callable[[int], Buffer]  # a chunk of the snapshot that deltas are from
Place = Callable[[int], memoryview | None]  # where a chunk is to be put, if it has a place already
Unpacked = tuple[memoryview | None, memoryview | None]  # see `Receiver.chunk`


class Fetching:
    """Asks for the missing chunks, at most `credit` ahead, until all are there.

    Deltas are unpacked, and encrypted chunks decrypted, in a pool's threads, which verify them. What gives another
    chunk than the manifest's is followed by a request for the whole chunk: what is handed out is right, whatever came.

    Args:
        missing: chunks to fetch; each leaves it when it has been handed out.
        base: chunks of the manifest's `base`; None: no deltas are asked for.
        pool: unpacks and decrypts; needed with `base` and with a connection that has a seal.
        place: chunks that come encrypted are decrypted into it.
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
        place: Place,
        take: Callable[[int, memoryview | None, memoryview | None], None],
    ) -> None:
        self.received_bytes = self.delta_chunks = self.corrupt_chunks = 0
        self._connection, self._manifest, self._missing, self._credit = connection, manifest, missing, credit
        self._base, self._pool, self._place, self._take = base, pool, place, take
        self._width = item_bytes(manifest)
        self._ahead = deque(sorted(missing))
        self._under_way: set[int] = set()
        self._unpacking: deque[tuple[int, Future[Unpacked | None]]] = deque()
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
            if self._unpacking and (not self._under_way or self._unpacking[0][1].done()):
                self._take_unpacked()
                continue
            reply, data = connection.fetched()
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
                if connection.seal is None and not connection.send(Hello()):
                    raise ConnectionLost(f"{server} is no longer there")
        return True

    def _ask(self, chunk: int) -> None:
        delta = self._base is not None and chunk not in self._whole
        if not self._connection.fetch(Fetch(snapshot=self._manifest.snapshot, chunk=chunk, delta=delta)):
            raise ConnectionLost(f"{self._connection.source.address} is not there")
        self._under_way.add(chunk)

    def _arrived(self, reply: Chunk, data: memoryview) -> None:
        self.received_bytes += len(data)
        if reply.delta and (self._base is None or reply.chunk in self._whole):
            self._ask_again(reply.chunk)
        elif self._connection.seal is None and not reply.delta:
            start, end = self._manifest.chunk_range(reply.chunk)
            if len(data) == end - start and checksum(data) == self._manifest.checksums[reply.chunk]:
                self._hand_out(reply.chunk, data, None)
            else:
                self._ask_again(reply.chunk)
        else:
            assert self._pool is not None
            self._unpacking.append((reply.chunk, self._pool.submit(self._unpack, reply, data)))

    def _unpack(self, reply: Chunk, data: memoryview) -> Unpacked | None:
        """In a thread of the pool: decrypt and verify; None where it is not the manifest's chunk."""
        delta, place, seal = None, None, self._connection.seal
        try:
            if seal is not None:
                place = self._place(reply.chunk) if not reply.delta else None
                data = seal.open(reply, data, place)
            if reply.delta:
                assert self._base is not None
                delta, data = data, decode(data, self._base(reply.chunk), self._width)
        except (WrongDelta, WrongSeal):
            return None
        start, end = self._manifest.chunk_range(reply.chunk)
        is_right = len(data) == end - start and checksum(data) == self._manifest.checksums[reply.chunk]
        if not is_right:
            return None
        return (data if place is None else None), delta

    def _take_unpacked(self) -> None:
        """Hand out what was unpacked first, once it is."""
        chunk, unpacked = self._unpacking.popleft()
        result = unpacked.result()
        if result is None:
            self._whole.add(chunk)
            self._ask_again(chunk)
            return
        data, delta = result
        self.delta_chunks += delta is not None
        self._hand_out(chunk, data, delta)

    def _hand_out(self, chunk: int, data: memoryview | None, delta: memoryview | None) -> None:
        self._take(chunk, data, delta)
        self._missing.discard(chunk)

    def _ask_again(self, chunk: int) -> None:
        self.corrupt_chunks += 1
        self._wrong[chunk] = self._wrong.get(chunk, 0) + 1
        if self._wrong[chunk] == WRONG_MOST:
            server = self._connection.source.address
            raise ConnectionLost(f"chunk {chunk} of {server} has a wrong checksum every time")
        self._ask(chunk)
