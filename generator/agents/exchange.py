"""A request for tokens and its reply, which is completed even if the client disconnects, and can be replayed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from generator.agents.tree import Node

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Exchange:
    """A request for tokens and its reply so far; any number of readers get all of it from the start."""

    def __init__(self, fingerprint: bytes, streamed: bool, node: Node) -> None:
        self.fingerprint = fingerprint  # equal for requests with the same path and body
        self.streamed = streamed  # whether the reply comes piece by piece, so that a reader may act on its beginning
        self.node = node
        self.task: asyncio.Task[None] | None = None  # produces the reply
        self.cut = asyncio.Event()  # once it is set, the engine ends the request with the tokens it has
        self.readers = 0  # how many are reading now
        self.seen = False  # a reader was sent enough of the reply to act on
        self.heard = False  # a reader was sent all of it
        self.failure: Exception | None = None  # ended the reply early
        self._began = time.monotonic()
        self._ended_at: float | None = None
        self._sent: list[AsgiMessage] | None = []
        self._last: AsgiMessage | None = None  # held back until `end`
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def ended(self) -> bool:
        return self.task is not None and self.task.done()

    @property
    def seconds(self) -> float:
        """How long the reply has taken, until now or until it ended."""
        return (self._ended_at or time.monotonic()) - self._began

    @property
    def can_be_heard(self) -> bool:
        return self._sent is not None

    async def send(self, message: AsgiMessage) -> None:
        """Add a piece of the reply, as an ASGI app sends it. Readers get the last piece once `end` is called."""
        if _is_last(message):
            self._last = message
        else:
            self._pass_on(message)

    def end(self) -> None:
        """Send the last piece, once the tokens are recorded: a client that has it may send its next request at once."""
        self._ended_at = time.monotonic()
        if self._last is not None:
            self._pass_on(self._last)

    def body(self) -> tuple[int, bytes]:
        """Status and body of the reply so far; the status is 0 before the first piece."""
        pieces = [*(self._sent or ()), *([self._last] if self._last else ())]
        status = next((piece["status"] for piece in pieces if piece["type"] == "http.response.start"), 0)
        return status, b"".join(piece.get("body", b"") for piece in pieces)

    async def follow(self, receive: Receive, send: Send) -> bool:
        """Send a reader the reply until its end, or until the reader disconnects.

        Returns:
            False if the reply ended before its first piece, otherwise True.

        Raises:
            ConnectionAbortedError: the reply broke off.
        """
        assert self._sent is not None
        assert self.task is not None
        sent, position = self._sent, 0
        self.readers += 1
        left = asyncio.create_task(_departure(receive))
        try:
            while not left.done():
                while position < len(sent) and not left.done():
                    message, position = sent[position], position + 1
                    await send(message)
                    last = _is_last(message)
                    self.heard |= last
                    self.seen |= last or (self.streamed and bool(message.get("body")))
                    if last:
                        return True
                if self.task.done() and position == len(sent):
                    if position:
                        raise ConnectionAbortedError
                    return False
                await asyncio.wait({self._next, left, self.task}, return_when=asyncio.FIRST_COMPLETED)
            return True
        finally:
            left.cancel()
            self.readers -= 1
            # A stream that nobody reads is not sampled to its end; a reply that was not seen is completed, for a retry.
            if self.readers == 0 and self.seen:
                self.cut.set()  # changes nothing if the request has ended

    def forget(self) -> None:
        """Free the reply; it can no longer be replayed."""
        self._sent = self._last = None

    def _pass_on(self, message: AsgiMessage) -> None:
        assert self._sent is not None
        self._sent.append(message)
        before, self._next = self._next, asyncio.get_running_loop().create_future()
        before.set_result(None)


def fresh_request(app: Any, method: str, path: str, body: bytes = b"") -> tuple[dict[str, Any], Receive]:
    """A new request for an app, made from a route and a body: no path, query or header of a client reaches the app.

    The app is never told that the client has disconnected, since a retry may want the reply.
    """
    request = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> AsgiMessage:
        return request.pop() if request else await asyncio.get_running_loop().create_future()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": {},
        "app": app,
    }
    return scope, receive


def _is_last(message: AsgiMessage) -> bool:
    return bool(message["type"] == "http.response.body" and not message.get("more_body"))


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
