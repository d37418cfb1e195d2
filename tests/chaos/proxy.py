"""A proxy between the processes of a run and Redis, whose connections can be made to fail."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

from launcher.run.embedded_redis import private_socket, remove_socket

Mode = Literal["open", "slow", "held", "mute", "half-closed"]
CHUNK = 1 << 16
SLOW = 0.2  # seconds that each piece of a slow connection is late


@dataclass(eq=False, slots=True)
class ProxiedConnection:
    """A client's connection, with the one to the server that stands behind it.

    Attributes:
        mode: `open`: the proxy has no effect. `slow`: everything is late. `held`: nothing passes in either direction,
            and neither end is told. `mute`: requests arrive, the next reply is lost together with the connection.
            `half-closed`: the client is told that nothing more will come, but its requests still arrive.
    """

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    changed: asyncio.Event
    mode: Mode = "open"

    def set(self, mode: Mode) -> None:
        self.mode = mode
        self.changed.set()
        self.changed.clear()
        if mode == "half-closed" and self.client.can_write_eof():
            with contextlib.suppress(OSError, RuntimeError):
                self.client.write_eof()

    def close(self) -> None:
        """Reset both ends."""
        for writer in (self.client, self.server):
            writer.transport.abort()


class Proxy:
    """Listens in a thread of its own, on a Unix socket that only this account can reach.

    Args:
        url: of the Redis behind it: `unix:///path?db=0` or `redis://host:port/0`.
        folder: for the socket; gets mode 0700.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self._parts = urlsplit(url)
        self._folder, self._socket = folder, private_socket(folder, "proxy.sock")
        self._loop = asyncio.new_event_loop()
        self._connections: set[ProxiedConnection] = set()
        self._mode: Mode = "open"  # of new connections
        self._share = 0.0
        self._random = random.Random(0)
        self._server = self._loop.run_until_complete(asyncio.start_unix_server(self._serve, self._socket))
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos-proxy", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The URL of the proxy, with the user, password and database of the Redis behind it."""
        credentials = self._parts.netloc.rpartition("@")[0]
        options = self._parts.query if self._parts.scheme == "unix" else f"db={self._parts.path.strip('/') or 0}"
        return f"unix://{credentials}{'@' * bool(credentials)}{quote(str(self._socket))}?{options}"

    def cut(self, share: float, seed: int) -> int:
        """Reset part of the connections; returns how many."""
        return self._on_some(share, seed, ProxiedConnection.close)

    def disturb(self, mode: Mode, share: float, seed: int) -> int:
        """Put part of the connections, and of those that are made until `heal`, into a mode; returns how many."""

        def change(connection: ProxiedConnection) -> None:
            connection.set(mode)

        self._mode, self._share, self._random = mode, share, random.Random(seed)
        return self._on_some(share, seed, change)

    def heal(self) -> None:
        """Every connection works again; those that cannot, because a part of what they carried is lost, are reset."""

        def change(connection: ProxiedConnection) -> None:
            if connection.mode in ("mute", "half-closed"):
                connection.close()
            else:
                connection.set("open")

        self._mode, self._share = "open", 0.0
        self._on_some(1.0, 0, change)

    def close(self) -> None:
        """Reset all connections and stop."""

        async def end() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._socket.unlink(missing_ok=True)
        remove_socket(self._socket, self._folder)

    def _on_some(self, share: float, seed: int, change: Callable[[ProxiedConnection], None]) -> int:
        async def work() -> int:
            chosen = random.Random(seed)
            some = [connection for connection in list(self._connections) if chosen.random() < share]
            for connection in some:
                change(connection)
            return len(some)

        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(timeout=10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            behind_reader, behind_writer = await self._connect()
        except OSError:  # Redis is down: so is what stands before it
            writer.transport.abort()
            return
        connection = ProxiedConnection(writer, behind_writer, asyncio.Event())
        if self._random.random() < self._share:
            connection.mode = self._mode
        self._connections.add(connection)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._requests(connection, reader))
                pumps.create_task(self._replies(connection, behind_reader))
        except* OSError:
            pass
        finally:
            self._connections.discard(connection)
            connection.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._parts.scheme == "unix":
            return await asyncio.open_unix_connection(unquote(self._parts.path))
        return await asyncio.open_connection(self._parts.hostname, self._parts.port)

    async def _requests(self, connection: ProxiedConnection, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(CHUNK):
            await self._pass(connection)
            connection.server.write(data)
            await connection.server.drain()
        raise ConnectionResetError

    async def _replies(self, connection: ProxiedConnection, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(CHUNK):
            await self._pass(connection)
            if connection.mode in ("mute", "half-closed"):
                raise ConnectionResetError
            connection.client.write(data)
            await connection.client.drain()
        raise ConnectionResetError

    async def _pass(self, connection: ProxiedConnection) -> None:
        """Wait as long as the connection's mode says."""
        if connection.mode == "slow":
            await asyncio.sleep(SLOW)
        while connection.mode == "held":
            await connection.changed.wait()
