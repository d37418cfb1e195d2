"""Pulls each snapshot chunk by chunk, over as many connections as it takes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from common.weights.connection import Connection
from common.weights.delta import THREADS
from common.weights.fetch import Base, Fetching
from common.weights.wire import Manifest


class Receiver(Protocol):
    """Takes what arrives, all but `place` in one thread."""

    def begin(self, manifest: Manifest) -> None:
        """A snapshot is on its way; one that was before it and has not ended never will."""
        ...

    def base(self, manifest: Manifest) -> Base | None:
        """The chunks of the snapshot that its deltas are from, where that one is here whole and has the same layout."""
        ...

    def chunk(self, index: int, data: memoryview, delta: memoryview | None) -> None:
        """One chunk of it, verified, and the delta that it came as, if it did.

        They come in any order.
        """
        ...

    def end(self, seconds: float) -> None:
        """All chunks are there; pulling took `seconds`."""
        ...


@dataclass
class TransferStats:
    """Counts over all transfers of a client, and where it pulls from now.

    Attributes:
        transferred_bytes: of the snapshots that arrived.
        received_bytes: that came for them, which is less where chunks came as deltas.
        delta_chunks: chunks that came as deltas.
        corrupt_chunks: chunks and deltas that were not what the manifest says.
    """

    transfers: int = 0
    transferred_bytes: int = 0
    received_bytes: int = 0
    delta_chunks: int = 0
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
    same name and checksums everywhere. A chunk whose checksum is wrong is asked for again; one that came as a delta, as
    a whole.

    Args:
        credit: chunks that are asked for ahead.
    """

    def __init__(self, receiver: Receiver, credit: int) -> None:
        self._receiver, self._credit = receiver, credit
        self._transfer: Transfer | None = None

    def drop(self) -> None:
        """Forget the transfer that was cut off: its snapshot, or a newer one, has come another way."""
        self._transfer = None

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
        base = self._receiver.base(manifest) if manifest.base and connection.deltas else None
        began = time.monotonic()
        try:
            with ExitStack() as stack:
                pool = None
                if base is not None:
                    pool = stack.enter_context(ThreadPoolExecutor(THREADS, "deltas"))
                fetching = Fetching(
                    connection,
                    manifest,
                    transfer.missing,
                    self._credit,
                    base,
                    pool,
                    self._receiver.chunk,
                )
                try:
                    complete = fetching.run()
                finally:
                    stats.received_bytes += fetching.received_bytes
                    stats.delta_chunks += fetching.delta_chunks
                    stats.corrupt_chunks += fetching.corrupt_chunks
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
