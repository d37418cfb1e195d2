"""Serves the dashboard until it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from launcher.dashboard.watch import Watch


class Server(uvicorn.Server):
    """uvicorn that ends the streams of open pages before it waits for them, and leaves signals to `serve`."""

    def __init__(self, app: Starlette, watch: Watch) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=5)
        )
        self._watch = watch

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what goes on."""
        await self._watch.stop()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own ends the process by the signal that it caught."""
        yield


async def serve(app: Starlette, watch: Watch, listener: socket.socket) -> None:
    """Answer requests on a socket until SIGINT or SIGTERM."""
    server = Server(app, watch)

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    await server.serve([listener])
