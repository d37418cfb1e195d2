"""Bounds on the HTTP connections of clients that are not authorized yet.

Connections that have not shown the token yet are bounded in number, in time and in what they may send: a client that
sends half a request and then nothing, or a byte now and then, would hold its connection for ever, and a few hundred
such clients would block the server. A connection without an authorized request after `PATIENCE` seconds is cut off; if
more than `MOST_UNADMITTED` wait, so is the one that has waited longest. A real client sends its request at once, so it
is never that one.

Admitted connections are bounded too, for each owner and in total, or one client could use up the files that this
process may open: if there are too many, the one that has waited longest for its next request is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

PATIENCE = 10.0  # seconds from the connection to the end of an authorized request's headers
MOST_UNADMITTED = 128
MOST_ADMITTED = 4096
HEADER_BYTES = 16 << 10  # per request; at most one more read of the socket is kept


class ServerWithoutSignals(uvicorn.Server):
    """uvicorn without its signal handlers, which end the process by the signal they caught."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Connections:
    """The connections of one server, each either waiting to be admitted or admitted.

    Args:
        patience: seconds a connection may take to be admitted.
        most_waiting: connections that may wait to be admitted.
        most_of_owner: admitted connections of one owner; None means `most`.
        most: admitted connections of all owners.
    """

    def __init__(
        self,
        patience: float = PATIENCE,
        most_waiting: int = MOST_UNADMITTED,
        most_of_owner: int | None = None,
        most: int = MOST_ADMITTED,
    ) -> None:
        self.patience = patience
        self.most_waiting, self.most_of_owner, self.most = most_waiting, most_of_owner or most, most
        self.waiting: dict[GuardedProtocol, asyncio.TimerHandle] = {}  # in the order of arrival
        # Ordered by the time of their last request: all connections, and those of each owner.
        self.admitted: dict[GuardedProtocol, Hashable] = {}
        self.owned: defaultdict[Hashable, dict[GuardedProtocol, None]] = defaultdict(dict)

    def protocol(self) -> type[asyncio.Protocol]:
        """The protocol class that uvicorn instantiates for each connection."""
        return cast(type[asyncio.Protocol], partial(GuardedProtocol, self))

    def add(self, connection: GuardedProtocol) -> None:
        self.waiting[connection] = asyncio.get_running_loop().call_later(self.patience, connection.cut_off)
        if len(self.waiting) > self.most_waiting:
            next(iter(self.waiting)).cut_off()

    def admit(self, connection: GuardedProtocol, owner: Hashable = None) -> None:
        """Count a connection as its owner's, once an authorized request has come from it."""
        self.remove(connection)
        self.admitted[connection] = owner
        self.owned[owner][connection] = None
        for group, most in ((self.owned[owner], self.most_of_owner), (self.admitted, self.most)):
            if len(group) > most:
                next((one for one in group if one.is_idle()), connection).cut_off()

    def remove(self, connection: GuardedProtocol) -> None:
        timer = self.waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()
        if connection in self.admitted:
            owner = self.admitted.pop(connection)
            del self.owned[owner][connection]
            if not self.owned[owner]:
                del self.owned[owner]


class GuardedProtocol(HttpToolsProtocol):
    """HTTP/1.1 on a connection that is not admitted until the application calls `admit` of the request's state.

    The parser keeps headers, and trailers after a body, however long they are; here they are bounded.
    """

    def __init__(self, connections: Connections, *, app_state: dict[str, Any], **options: Any) -> None:
        super().__init__(app_state=app_state | {"admit": partial(connections.admit, self)}, **options)
        self._connections = connections
        self._besides_body = 0  # bytes since the last piece of a body, or the end of a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
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

    def is_idle(self) -> bool:
        """Whether all of its requests have been answered completely."""
        return self.cycle is None or self.cycle.response_complete

    def cut_off(self) -> None:
        self._connections.remove(self)
        self.transport.abort()
