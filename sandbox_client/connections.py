"""HTTP connections whose clients may mean harm.

Connections that have not shown the token yet are bounded in number, in time and in what they may send: a client that
sends half a request and then nothing, or a byte now and then, would hold its connection for ever, and a few hundred
such clients would block the server. A connection without an authorized request after `PATIENCE` seconds is cut off; if
more than `MOST_UNADMITTED` wait, so is the one that has waited longest. A real client sends its request at once, so it
is never that one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

PATIENCE = 10.0  # seconds from the connection to the end of an authorized request's headers
MOST_UNADMITTED = 128
HEADER_BYTES = 16 << 10  # of one request, and at most one read of the socket more


class ServerWithoutSignals(uvicorn.Server):
    """uvicorn without its signal handlers, which end the process by the signal they caught."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class UnadmittedConnections:
    """The connections of one server that have not been admitted.

    Args:
        patience: seconds a connection may take to be admitted.
        most: connections that may wait to be admitted.
    """

    def __init__(self, patience: float = PATIENCE, most: int = MOST_UNADMITTED) -> None:
        self.patience = patience
        self.most = most
        self.waiting: dict[GuardedProtocol, asyncio.TimerHandle] = {}  # in the order in which they came

    def protocol(self) -> type[asyncio.Protocol]:
        """The class that uvicorn makes an object of for each connection."""
        return cast(type[asyncio.Protocol], partial(GuardedProtocol, self))

    def add(self, connection: GuardedProtocol) -> None:
        self.waiting[connection] = asyncio.get_running_loop().call_later(self.patience, connection.cut_off)
        if len(self.waiting) > self.most:
            next(iter(self.waiting)).cut_off()

    def remove(self, connection: GuardedProtocol) -> None:
        """Forget a connection that was admitted, or has ended."""
        timer = self.waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()


class GuardedProtocol(HttpToolsProtocol):
    """HTTP/1.1 on a connection that is not admitted until the application calls `admit` of the request's state.

    The parser keeps headers, and trailers behind a body, however long they are; here they are bounded.
    """

    def __init__(self, admission: UnadmittedConnections, *, app_state: dict[str, Any], **options: Any) -> None:
        admit: Callable[[], None] = partial(admission.remove, self)
        super().__init__(app_state=app_state | {"admit": admit}, **options)
        self._admission = admission
        self._besides_body = 0  # bytes since the last piece of a body, or the end of a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._admission.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._admission.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._besides_body += len(data)
        super().data_received(data)
        if self._besides_body > HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("The headers are too long.")

    def on_body(self, body: bytes) -> None:
        self._besides_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._besides_body = 0
        super().on_message_complete()

    def cut_off(self) -> None:
        self._admission.remove(self)
        self.transport.abort()
