"""Takes snapshots from the memory of a server on this machine; those of others are pulled chunk by chunk."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from common.config import WeightsConfig
from common.weights.connection import TICK, Connection
from common.weights.delta import THREADS
from common.weights.handover import GONE, HERE, REQUEST_BYTES, boot_id, connect, shared_folder
from common.weights.memory import MemoryFile
from common.weights.pull import ChunkPuller, TransferStats
from common.weights.wire import Manifest, checksum


class HandedOver:
    """A snapshot's memory, which its server leaves as it is until `close`.

    Attributes:
        file: the first `Manifest.total_bytes` of it are the snapshot.
    """

    def __init__(self, connection: socket.socket, file: MemoryFile) -> None:
        self.file = file
        self._connection = connection

    def close(self) -> None:
        """The memory may serve again; may be called again."""
        self.file.close()
        self._connection.close()


class NotHandedOver(Exception):
    """Why a snapshot has to be pulled over the socket."""


class Taker:
    """A `common.weights.follow.Puller` that asks for shared memory first.

    Args:
        config: says where servers of this machine have their Unix sockets. With `deltas: on` weights are wanted as
            deltas, and nothing is asked for.
        puller: does what there is no shared memory for.
        take: gets each snapshot, verified, and the seconds it took.
    """

    def __init__(
        self,
        config: WeightsConfig,
        puller: ChunkPuller,
        take: Callable[[Manifest, HandedOver, float], None],
        log: Any,
    ) -> None:
        self._puller, self._take, self._log = puller, take, log
        self._folder = None if config.deltas == "on" else shared_folder(config)
        self._way = ""  # that was logged last

    def pull(self, connection: Connection, manifest: Manifest, stats: TransferStats) -> bool:
        """See `common.weights.follow.Puller`."""
        began = time.monotonic()
        try:
            handed = self._ask(connection, manifest.snapshot, manifest.total_bytes)
            if handed is None:
                stats.restarts += 1
                return False
            wrong = wrong_chunks(manifest, handed.file)
            if wrong:
                stats.corrupt_chunks += wrong
                handed.close()
                raise NotHandedOver(f"{wrong} chunks in shared memory have wrong checksums")
        except NotHandedOver as error:
            self._log_way(connection, f"over the network: {error}")
            return self._puller.pull(connection, manifest, stats)
        self._log_way(connection, "through shared memory")
        connection.deltas = False  # none need be made for us
        self._puller.drop()
        seconds = time.monotonic() - began
        stats.transfers += 1
        stats.transferred_bytes += manifest.total_bytes
        stats.seconds += seconds
        self._take(manifest, handed, seconds)
        return True

    def _ask(self, connection: Connection, snapshot: str, size: int) -> HandedOver | None:
        """The snapshot's memory; None if it is no longer served.

        Raises:
            NotHandedOver: it has to be pulled.
            ConnectionLost, Stopped: as of `Connection`.
        """
        if self._folder is None:
            raise NotHandedOver("learner.weights.shared_folder is off, or deltas is on")
        if not connection.handover:
            raise NotHandedOver("no shared memory is offered")
        path = self._folder / connection.handover
        if not connection.handover.startswith(boot_id()):
            if path.exists():
                raise NotHandedOver(f"{self._folder} is shared with another machine, and memory cannot be")
            raise NotHandedOver("from another machine")
        with ExitStack() as stack:
            try:
                server = stack.enter_context(connect(path))
                server.send(f"{connection.token} {snapshot}".encode())
            except FileNotFoundError:
                raise NotHandedOver(f"{self._folder} is not shared with it") from None
            except OSError as error:
                raise NotHandedOver(f"nobody hands over memory at {path} ({error.strerror or error})") from None
            while not select.select([server], [], [], TICK)[0]:
                connection.check()
            word, numbers = _receive(server)
            if word == GONE:
                return None
            if word != HERE or len(numbers) != 1:
                for number in numbers:
                    os.close(number)
                raise NotHandedOver("it refused to hand over its memory")
            try:
                file = MemoryFile.received(numbers[0], size)
            except (OSError, ValueError) as error:
                raise NotHandedOver(str(error)) from None
            stack.pop_all()
            return HandedOver(server, file)

    def _log_way(self, connection: Connection, way: str) -> None:
        way = f"{connection.source.address} {way}"
        if way != self._way:
            self._way = way
            address, _, how = way.partition(" ")
            self._log.info("weights come " + how, source=address)


def wrong_chunks(manifest: Manifest, file: MemoryFile) -> int:
    """How many chunks of a snapshot are not what its manifest says; several threads compute checksums."""

    def is_wrong(chunk: int) -> bool:
        return checksum(file.view(*manifest.chunk_range(chunk))) != manifest.checksums[chunk]

    with ThreadPoolExecutor(THREADS, "checksums") as pool:
        return sum(pool.map(is_wrong, range(len(manifest.checksums))))


def _receive(server: socket.socket) -> tuple[bytes, list[int]]:
    """A word and the descriptors that came with it; nothing of a server that has gone."""
    try:
        word, numbers, _, _ = socket.recv_fds(server, REQUEST_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return b"", []
    return word, numbers
