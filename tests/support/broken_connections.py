"""Connections that break at chosen moments, under the SDKs' own HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

import httpx2

Moment = Literal["generating", "headers", "stream"]


@dataclass(slots=True)
class Trouble:
    """What happens to the next attempt of a request; later attempts of it go through."""

    moment: Moment  # the connection breaks: while the engine generates, before the reply is read, or within a stream
    pieces: int = 0  # of the stream that still arrive
    generating: asyncio.Event = field(default_factory=asyncio.Event)  # set once the engine has the request
    over: bool = False


TROUBLE: ContextVar[Trouble | None] = ContextVar("TROUBLE", default=None)


class BreakingTransport(httpx2.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        trouble = TROUBLE.get()
        if trouble is None or trouble.over:
            return await super().handle_async_request(request)
        trouble.over = True
        if trouble.moment == "generating":
            reply = asyncio.create_task(super().handle_async_request(request))
            waiting = asyncio.create_task(trouble.generating.wait())
            await asyncio.wait({reply, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            reply.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await reply).aclose()
            raise httpx2.ReadError("broken", request=request)
        response = await super().handle_async_request(request)
        if trouble.moment == "headers":
            await response.aclose()
            raise httpx2.ReadError("broken", request=request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BreakingStream(response.stream, trouble.pieces)
        return response


class _BreakingStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, pieces: int) -> None:
        self._stream, self._pieces = stream, pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._pieces
        async for piece in self._stream:
            if left == 0:
                raise httpx2.ReadError("broken")
            left -= 1
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
