"""One request's way through an ASGI app: it runs to its end whoever listens, and can be heard again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Exchange:
    """A request, and what the app sent for it; any number of readers hear all of it from the start.

    Attributes:
        fingerprint: equal for requests with the same body.
        streamed: whether the reply comes piece by piece, so that a reader may act on its beginning.
        node: the request in the session's tree; None if it asks for no tokens.
        cut: once it is set, the engine ends the request with the tokens it has.
        readers: how many listen now.
        seen: a reader was sent enough of the reply to act on.
        heard: a reader was sent all of it.
        failure: what the app raised.
        seconds: how long the app has taken, until now or until it ended.
    """

    def __init__(self, fingerprint: bytes, streamed: bool, node: Any = None) -> None:
        self.fingerprint, self.streamed, self.node = fingerprint, streamed, node
        self.cut = asyncio.Event()
        self.readers = 0
        self.seen = self.heard = False
        self.failure: Exception | None = None
        self.task: asyncio.Task[None] | None = None
        self._began, self._seconds = time.monotonic(), cast(float | None, None)
        self._sent: list[AsgiMessage] | None = []
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def ended(self) -> bool:
        return self.task is not None and self.task.done()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began if self._seconds is None else self._seconds

    @property
    def can_be_heard(self) -> bool:
        return self._sent is not None

    def start(self, app: App, scope: MutableMapping[str, Any], body: bytes, on_end: Callable[[], None]) -> None:
        """Run the app on a request.

        Args:
            on_end: called once, before a reader hears the last of the reply, or when the app gives up.
        """
        self.task = asyncio.create_task(self._run(app, scope, body, on_end))

    async def follow(self, receive: Receive, send: Send) -> bool:
        """Send a reader all that the app sends, until that ends or the reader leaves.

        Returns:
            Whether the reader has heard anything that it may take for a reply.

        Raises:
            ConnectionAbortedError: the app ended in the middle of its reply.
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
            if self.readers == 0 and self.seen:
                self.cut.set()  # changes nothing if the request has ended

    def body(self) -> tuple[int, bytes]:
        """Status and body of the reply so far."""
        sent = self._sent or []
        status = next((message["status"] for message in sent if message["type"] == "http.response.start"), 0)
        return status, b"".join(message.get("body", b"") for message in sent)

    def forget(self) -> None:
        """Free the reply, so that it cannot be heard again."""
        self._sent = None

    async def _run(self, app: App, scope: MutableMapping[str, Any], body: bytes, on_end: Callable[[], None]) -> None:
        request = [{"type": "http.request", "body": body, "more_body": False}]
        sent = self._sent
        assert sent is not None

        async def receive() -> AsgiMessage:
            # The app never hears that a reader has left: the reply may be for a retry.
            return request.pop() if request else await asyncio.get_running_loop().create_future()

        async def send(message: AsgiMessage) -> None:
            sent.append(message)
            if _is_last(message):
                on_end()
            before, self._next = self._next, asyncio.get_running_loop().create_future()
            before.set_result(None)

        try:
            await app(scope, receive, send)
        except Exception as error:
            self.failure = error
        finally:
            self._seconds = self.seconds
            if not sent or not _is_last(sent[-1]):
                on_end()


def _is_last(message: AsgiMessage) -> bool:
    return bool(message["type"] == "http.response.body" and not message.get("more_body"))


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
