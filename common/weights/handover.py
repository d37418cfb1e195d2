"""Hands weights to other processes of a machine: files of shared memory, passed through a Unix socket.

The socket lies in a folder that the processes share, which may be a volume of several containers. A process that can
connect there runs under the same kernel, and gets a descriptor of the file. It keeps its connection while it reads, so
that the kernel tells the server when the process ends in any way, and the memory can be used again.

A client sends the token of the server's `Welcome` and the name of a snapshot. The answer is one word, with the
descriptor if it is `HERE`; it comes once the snapshot is whole.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from common.config import WeightsConfig
from common.weights.connection import TICK, Connection
from common.weights.delta import THREADS
from common.weights.memory import MemoryFile, Snapshot
from common.weights.wire import Manifest, checksum

HERE, GONE, REFUSED = b"here", b"gone", b"refused"
REQUEST_BYTES = 256
MOST_SILENT = 128  # clients without a request; if there are more, the oldest is cut off
SUFFIX = ".sock"
DEFAULT_FOLDER = "/dev/shm/spo-{account}"

Find = Callable[[str], Snapshot | None]


class Handover:
    """Hands snapshots that lie in a `MemoryFile` to processes of this account, from the thread that calls `turn`.

    Args:
        folder: where the socket is made; sockets that processes of this machine have left there are removed.

    Attributes:
        name: the socket's name in the folder; begins with the machine's boot id.
        token: required of clients.

    Raises:
        OSError: no socket can be made in this folder.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_abandoned(folder)
        self.name = f"{boot_id()}-{secrets.token_hex(8)}{SUFFIX}"
        self.token = secrets.token_hex(32)
        self._path = folder / self.name
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._clients: dict[int, _Client] = {}
        try:
            with _short(self._path) as path:
                self._listener.bind(path)
            self._path.chmod(0o600)
            self._listener.listen(64)
            self._listener.setblocking(False)
        except BaseException:
            self._listener.close()
            raise
        self._events = select.epoll()
        self._events.register(self._listener, select.EPOLLIN)

    def fileno(self) -> int:
        """A descriptor that is readable when `turn` has something to do."""
        return self._events.fileno()

    def turn(self, find: Find) -> None:
        """Accept clients, forget those that left, and answer those whose snapshot is complete or no longer served."""
        for number, _ in self._events.poll(0):
            if number == self._listener.fileno():
                self._let_in()
            elif number in self._clients:
                self._read(self._clients[number])
        for client in list(self._clients.values()):
            if client.wants:
                self._answer(client, find(client.wants))

    def holds(self, snapshot: str) -> bool:
        """True if a client still reads a snapshot's memory, or is about to."""
        return any(snapshot in (client.holds, client.wants) for client in self._clients.values())

    def close(self) -> None:
        """Stop handing over snapshots; clients that are reading may continue."""
        self._path.unlink(missing_ok=True)
        for client in list(self._clients.values()):
            self._forget(client)
        self._events.close()
        self._listener.close()

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):  # the client has left again, or no descriptors are left
            connection, _ = self._listener.accept()
            if peer_account(connection) != os.geteuid():
                connection.close()
                return
            connection.setblocking(False)
            self._clients[connection.fileno()] = _Client(connection)
            self._events.register(connection, select.EPOLLIN)
        # A real client asks at once, so it is never the one that has been silent for the longest.
        silent = [client for client in self._clients.values() if not (client.wants or client.holds)]
        for client in silent[:-MOST_SILENT]:
            self._forget(client)

    def _read(self, client: _Client) -> None:
        try:
            request = client.connection.recv(REQUEST_BYTES)
        except OSError:
            request = b""
        token, _, snapshot = request.partition(b" ")
        if not request or client.wants or client.holds:
            self._forget(client)
        elif snapshot and secrets.compare_digest(token, self.token.encode()):
            client.wants = snapshot.decode(errors="replace")
        else:
            self._say(client, REFUSED)

    def _answer(self, client: _Client, snapshot: Snapshot | None) -> None:
        if snapshot is None:
            self._say(client, GONE)
        elif snapshot.complete:
            client.wants, client.holds = "", snapshot.name
            try:
                socket.send_fds(client.connection, [HERE], [snapshot.file.number])
            except OSError:
                self._forget(client)

    def _say(self, client: _Client, word: bytes) -> None:
        with contextlib.suppress(OSError):
            client.connection.send(word)
        self._forget(client)

    def _forget(self, client: _Client) -> None:
        del self._clients[client.connection.fileno()]
        self._events.unregister(client.connection)
        client.connection.close()


class _Client:
    """A connection; the snapshot that it has asked for, and then the one that it was handed."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.wants = self.holds = ""


class NotHandedOver(Exception):
    """The reason why a snapshot has to be pulled over the network."""


class HandedOver:
    """A snapshot's memory, the first bytes of `file`, which its server does not change before `close`."""

    def __init__(self, connection: socket.socket, file: MemoryFile) -> None:
        self.file = file
        self._connection = connection

    def close(self) -> None:
        """Let the server use the memory again; may be called again."""
        self.file.close()
        self._connection.close()

    def wrong_chunks(self, manifest: Manifest) -> int:
        """Count the chunks that are not what the manifest says; several threads compute checksums."""

        def is_wrong(chunk: int) -> bool:
            return checksum(self.file.view(*manifest.chunk_range(chunk))) != manifest.checksums[chunk]

        with ThreadPoolExecutor(THREADS, "checksums") as pool:
            return sum(pool.map(is_wrong, range(len(manifest.checksums))))


def take(folder: Path | None, connection: Connection, manifest: Manifest) -> HandedOver | None:
    """Ask a server of this machine for a snapshot's memory; None if the snapshot is no longer served.

    Args:
        folder: where servers of this machine have their sockets; None if shared memory is not used.

    Raises:
        NotHandedOver: the snapshot has to be pulled over the network.
        ConnectionLost, Stopped: see `Connection`.
    """
    if folder is None:
        raise NotHandedOver("learner.weights.shared_folder is off, or deltas is on")
    if not connection.handover:
        raise NotHandedOver("no shared memory is offered")
    path = folder / connection.handover
    if not connection.handover.startswith(boot_id()):
        if os.path.exists(path):  # unlike `Path.exists`, also if the folder cannot be looked into
            raise NotHandedOver(f"{folder} is shared with another machine, but memory cannot be")
        raise NotHandedOver("from another machine")
    with ExitStack() as stack:
        try:
            server = stack.enter_context(connect(path))
            server.send(f"{connection.token} {manifest.snapshot}".encode())
        except FileNotFoundError:
            raise NotHandedOver(f"{folder} is not shared with the server") from None
        except OSError as error:
            raise NotHandedOver(f"no process hands over memory at {path} ({error.strerror or error})") from None
        answered = select.poll()  # `select.select` fails at descriptors above 1,023
        answered.register(server, select.POLLIN)
        while not answered.poll(TICK * 1000):
            connection.check()
        try:
            word, numbers, _, _ = socket.recv_fds(server, REQUEST_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
        except OSError:  # the server has gone
            word, numbers = b"", []
        if word == GONE:
            return None
        if word != HERE or len(numbers) != 1:
            for number in numbers:
                os.close(number)
            raise NotHandedOver("it refused to hand over its memory")
        try:
            file = MemoryFile.received(numbers[0], manifest.total_bytes)
        except (OSError, ValueError) as error:
            raise NotHandedOver(str(error)) from None
        stack.pop_all()
        return HandedOver(server, file)


def shared_folder(config: WeightsConfig) -> Path | None:
    """The folder of this machine's `Handover` sockets; None if `shared_folder` is off."""
    if config.shared_folder == "off":
        return None
    if config.shared_folder == "auto":
        return Path(DEFAULT_FOLDER.format(account=os.geteuid()))
    return Path(config.shared_folder)


def connect(path: Path) -> socket.socket:
    """Connect to the `Handover` that made a socket; raises OSError unless it is of this account and kernel."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short(path) as short:
            connection.connect(short)
        if peer_account(connection) != os.geteuid():
            raise PermissionError("it belongs to another account")
    except BaseException:
        connection.close()
        raise
    return connection


def peer_account(connection: socket.socket) -> int:
    """User id of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def boot_id() -> str:
    """The kernel's id of this start of the machine, the same in all its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def remove_abandoned(folder: Path) -> None:
    """Remove sockets of this machine on which no process listens any more."""
    for path in folder.glob(f"{boot_id()}-*{SUFFIX}"):
        try:
            connect(path).close()
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            continue


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A short path to the same file: the path of a socket has at most 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
