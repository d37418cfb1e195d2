"""Pulls a snapshot chunk by chunk, over as many connections as it takes."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from common.weights.connection import Connection, ConnectionLost
from common.weights.wire import Chunk, Fetch, Gone, Hello, Manifest, checksum

HELLO_AFTER = 1.0  # seconds of silence in a transfer after which we check whether the server is still connected
WRONG_MOST = 5  # times that a chunk may arrive with a wrong checksum


class Receiver(Protocol):
    """Takes what arrives, all in one thread."""

    def begin(self, manifest: Manifest) -> None:
        """A snapshot is on its way; one that was before it and has not ended never will."""
        ...

    def chunk(self, index: int, data: memoryview) -> None:
        """One chunk of it, verified; they come in any order."""
        ...

    def end(self, seconds: float) -> None:
        """All chunks are there; pulling took `seconds`."""
        ...


@dataclass
class TransferStats:
    """Counts over all transfers of a client, and where it pulls from now."""

    transfers: int = 0
    transferred_bytes: int = 0
    seconds: float = 0.0
    corrupt_chunks: int = 0
    restarts: int = 0
    reconnects: int = 0
    source: str = ""


@dataclass
class Transfer:
    """A snapshot on its way.

    Attributes:
        missing: chunks that have not arrived.
        seconds: spent on it so far.
    """

    manifest: Manifest
    missing: set[int] = field(init=False)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.missing = set(range(len(self.manifest.checksums)))


class ChunkPuller:
    """Fetches each snapshot for a receiver.

    A transfer that is cut off goes on with the chunks that are missing, also from another server: a snapshot has the
    same name and checksums everywhere. A chunk whose checksum is wrong is asked for again.

    Args:
        credit: chunks that are asked for ahead.
    """

    def __init__(self, receiver: Receiver, credit: int) -> None:
        self._receiver, self._credit = receiver, credit
        self._transfer: Transfer | None = None

    def pull(self, connection: Connection, manifest: Manifest, stats: TransferStats) -> bool:
        """Fetch the chunks that are missing; False if the server has dropped the snapshot meanwhile.

        Raises:
            ConnectionLost: nothing came for `connection.timeout` seconds, or a chunk is wrong every time.
            Stopped: see `Connection`.
        """
        if self._transfer is None or self._transfer.manifest != manifest:
            self._transfer = Transfer(manifest)
            self._receiver.begin(manifest)
        transfer = self._transfer
        began = time.monotonic()
        try:
            complete = self._fetch_missing(connection, transfer, stats)
        finally:
            transfer.seconds += time.monotonic() - began
        if not complete:
            stats.restarts += 1
            return False
        stats.transfers += 1
        stats.transferred_bytes += manifest.total_bytes
        stats.seconds += transfer.seconds
        self._transfer = None
        self._receiver.end(transfer.seconds)
        return True

    def _fetch_missing(self, connection: Connection, transfer: Transfer, stats: TransferStats) -> bool:
        server, timeout = connection.source.address, connection.timeout
        name = transfer.manifest.snapshot
        ahead = deque(sorted(transfer.missing))
        under_way: set[int] = set()
        wrong: dict[int, int] = {}
        arrived = asked = greeted = time.monotonic()
        while transfer.missing:
            while ahead and len(under_way) < self._credit:
                _fetch(connection, name, ahead[0])
                under_way.add(ahead.popleft())
            reply, data = connection.receive()
            now = time.monotonic()
            if isinstance(reply, Gone) and reply.snapshot == name:
                return False
            if isinstance(reply, Chunk) and reply.snapshot == name and reply.chunk in under_way:
                arrived = now
                if _is_right(transfer.manifest, reply.chunk, data):
                    self._receiver.chunk(reply.chunk, data)
                    under_way.discard(reply.chunk)
                    transfer.missing.discard(reply.chunk)
                    continue
                stats.corrupt_chunks += 1
                wrong[reply.chunk] = wrong.get(reply.chunk, 0) + 1
                if wrong[reply.chunk] == WRONG_MOST:
                    raise ConnectionLost(f"chunk {reply.chunk} of {server} has a wrong checksum every time")
                _fetch(connection, name, reply.chunk)
            elif now - arrived > timeout:
                raise ConnectionLost(f"{server} has sent no weights for {timeout:g} s")
            elif now - max(arrived, asked) > timeout / 4:
                asked = now
                for chunk in under_way:
                    _fetch(connection, name, chunk)
            elif now - max(arrived, greeted) > HELLO_AFTER:
                greeted = now
                if not connection.send(Hello()):
                    raise ConnectionLost(f"{server} is no longer there")
        return True


def _fetch(connection: Connection, snapshot: str, chunk: int) -> None:
    if not connection.send(Fetch(snapshot=snapshot, chunk=chunk)):
        raise ConnectionLost(f"{connection.source.address} is not there")


def _is_right(manifest: Manifest, chunk: int, data: memoryview) -> bool:
    start, end = manifest.chunk_range(chunk)
    return len(data) == end - start and checksum(data) == manifest.checksums[chunk]
