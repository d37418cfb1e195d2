"""Connections that have not shown the token yet: bounded in number, in time and in what they may send.

A client that sends half a request and then nothing, or a byte now and then, would hold its connection for ever, and
some hundred such clients the whole server. So whoever has sent no authorized request after `PATIENCE` seconds is cut
off, and of more than `MOST` the one that has waited longest: a real client sends its request at once, and is never
that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 10.0  # seconds from the connection to the end of an authorized request's headers
MOST = 128
HEADER_BYTES = 16 << 10  # of one request


class Strangers:
    """The connections of one server that have not been admitted.

    Args:
        patience: seconds a connection may take to be admitted.
        most: connections that may be waiting for it.
    """

    def __init__(self, patience: float = PATIENCE, most: int = MOST) -> None:
        self.patience = patience
        self.most = most
        # In the order in which they came.
        self.waiting: dict[GuardedProtocol, asyncio.TimerHandle] = {}

    def protocol(self) -> type[asyncio.Protocol]:
        """What uvicorn makes for each connection."""
        return cast(type[asyncio.Protocol], partial(GuardedProtocol, self))

    def add(self, connection: GuardedProtocol) -> None:
        """A connection was made."""
        self.waiting[connection] = asyncio.get_running_loop().call_later(self.patience, connection.cut_off)
        if len(self.waiting) > self.most:
            next(iter(self.waiting)).cut_off()

    def remove(self, connection: GuardedProtocol) -> None:
        """A connection was admitted, or has ended."""
        timer = self.waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 on a connection that is a stranger's until the application calls `admit` of the request's state."""

    def __init__(self, strangers: Strangers, *, app_state: dict[str, Any], **given: Any) -> None:
        admit: Callable[[], None] = partial(strangers.remove, self)
        super().__init__(app_state=app_state | {"admit": admit}, **given)
        self._strangers = strangers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the connection's time."""
        super().connection_made(transport)
        self._strangers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._strangers.remove(self)
        super().connection_lost(exc)

    def cut_off(self) -> None:
        """End the connection at once."""
        self._strangers.remove(self)
        self.transport.abort()
