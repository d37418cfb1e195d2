"""A dialect of the endpoint: how a request for tokens is read, answered and recorded."""

from __future__ import annotations

import asyncio
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

from generator.agents.exchange import Exchange
from generator.agents.refusals import Refused
from generator.agents.session import AgentRequest, AgentSession
from generator.chat.template import Message
from generator.concurrency import LONG_TEXT, offload


class Dialect(ABC):
    """Reads bodies as chat requests, has them answered, and reads the replies as chat messages."""

    path: str
    errors = "openai"  # the API whose format error replies have

    async def take(self, session: AgentSession, body: dict[str, Any], raw: bytes, is_retry: bool) -> Exchange:
        """Begin to answer a session's request, or find the earlier request that it repeats; raises `Refusal`.

        Args:
            raw: the body's bytes.
            is_retry: whether the client marked the request as a retry.
        """
        fingerprint = hashlib.blake2b(self.path.encode() + b"\0" + raw, digest_size=16).digest()
        if (earlier := session.retried(fingerprint, is_retry)) is not None:
            return earlier
        request = await offload(len(raw) > LONG_TEXT, self.read, body, session.limits.ignore)
        exchange = await session.begin(request, fingerprint)
        exchange.task = asyncio.create_task(self._answer(session, exchange, request))
        return exchange

    async def _answer(self, session: AgentSession, exchange: Exchange, request: AgentRequest) -> None:
        """Complete the reply even if no client reads it, and record it before a client gets its last piece."""
        try:
            await self.respond(session, exchange, request)
        except Exception as error:
            exchange.failure = error
        finally:  # also if the session is closed, which may cancel this task
            status, body = exchange.body()
            if status == 200 and exchange.node.turn is not None:
                session.answer(exchange.node, self.reply(body, exchange.streamed))
            else:
                session.drop(exchange.node)
                if status >= 400 and not session.over.is_set():
                    session.count_refusal(Refused(status, self.path, _error_in(body)))
            exchange.end()

    @abstractmethod
    def read(self, body: dict[str, Any], ignore: Collection[str] = ()) -> AgentRequest:
        """The request in a body without the fields in `ignore` (see `AgentConfig`); raises `Refusal`."""

    @abstractmethod
    async def respond(self, session: AgentSession, exchange: Exchange, request: AgentRequest) -> None:
        """Sample the reply and send it to the exchange; `session.sampled` records the tokens."""

    @abstractmethod
    def reply(self, body: bytes, streamed: bool) -> Message | None:
        """This reply as the message that the agent sends back in its next request; None if it holds no message."""


def _error_in(body: bytes) -> str:
    """The message of an error of vLLM's server, in one line."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = body[:500].decode(errors="replace")
    return " ".join(str(message).split())[:500]
