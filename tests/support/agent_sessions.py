"""The layer of the agents' endpoint around an app of the test's own, with clients that leave and come again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from generator.agents.dialect import Dialect
from generator.agents.exchange import AsgiMessage, Exchange
from generator.agents.layer import SessionLayer
from generator.agents.refusals import Refusal, SessionsLog
from generator.agents.session import AgentRequest, AgentSession, SessionLimits
from tests.support.episode import TEMPLATE, TOKENIZER, completion
from tests.support.event_loop import within

MODEL = "policy"
MAX_BODY = 1 << 16
CHAT = "/v1/chat/completions"


class PlainChat(Dialect):
    """A dialect whose bodies are chat messages, and whose replies are one message or its text in pieces."""

    path = CHAT

    def __init__(self, app: PretendApp) -> None:
        self._app = app

    async def respond(self, session: AgentSession, exchange: Exchange, request: AgentRequest) -> None:
        await self._app.respond(session, exchange)

    def read(self, body: dict[str, Any], ignore: Collection[str] = ()) -> AgentRequest:
        if not isinstance(body.get("messages"), list):
            raise Refusal(400, "messages: Field required")
        sampling = {"temperature": body.get("temperature")}
        ignored = tuple(name for name in ignore if name in body)
        return AgentRequest(body["messages"], {}, bool(body.get("stream")), sampling, ignored, body)

    def reply(self, body: bytes, streamed: bool) -> dict[str, Any] | None:
        text = body.decode() if streamed else json.loads(body)["content"]
        return {"role": "assistant", "content": text} if text else None


class Anthropic(PlainChat):
    path, errors = "/v1/messages", "anthropic"


@dataclass
class PretendApp:
    """Replies with `texts`, one a request and the last one repeatedly, once `gate` is open.

    Attributes:
        prompts: ids of the requests for tokens that reached it.
        scopes: the other requests that reached it.
        fail: raised in place of a reply.
        deaf: whether it continues after its request is cut.
    """

    texts: list[str] = field(default_factory=lambda: ["yes<|im_end|>"])
    prompts: list[list[int]] = field(default_factory=list)
    scopes: list[Any] = field(default_factory=list)
    fail: Exception | None = None
    status: int = 200
    deaf: bool = False
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    entered: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        await self._send(send, b"{}")

    async def respond(self, session: AgentSession, exchange: Exchange) -> None:
        self.prompts.append(exchange.node.prompt_ids().tolist())
        self.entered.set()
        if self.fail is not None:
            raise self.fail
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        shown = text.removesuffix("<|im_end|>").encode()
        start = {"type": "http.response.start", "status": self.status, "headers": []}
        if exchange.streamed:
            await exchange.send(start)
            await exchange.send({"type": "http.response.body", "body": shown[:1], "more_body": True})
        ends = [self.gate.wait()] if self.deaf else [self.gate.wait(), exchange.cut.wait()]
        waiting = [asyncio.ensure_future(end) for end in ends]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in waiting:
                end.cancel()
        ids, whole = TOKENIZER.encode(text, add_special_tokens=False), self.gate.is_set()
        if not whole:
            ids, shown = ids[:1], shown[:1]
        reason = "stop" if whole and text.endswith("<|im_end|>") else "length"
        session.sampled(exchange.node, completion(ids, reason))
        if exchange.streamed:
            await exchange.send({"type": "http.response.body", "body": shown[1:]})
        else:
            await self._send(exchange.send, json.dumps({"content": shown.decode()}).encode())

    async def _send(self, send: Any, body: bytes) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": body})


class Client:
    """One request, from a client that may leave."""

    def __init__(self, layer: SessionLayer, path: str, key: str | None, body: Any, **more: Any) -> None:
        self.sent: list[AsgiMessage] = []
        self.left = asyncio.Event()
        self.heard = asyncio.Event()
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        headers += [(name.encode(), value.encode()) for name, value in more.get("headers", {}).items()]
        chunks = more.get("chunks") or [raw]
        incoming = [
            {"type": "http.request", "body": chunk, "more_body": more.get("endless", False) or i + 1 < len(chunks)}
            for i, chunk in enumerate(chunks)
        ]

        async def receive() -> Any:
            if incoming:
                return incoming.pop(0)
            await self.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)
            if message.get("body"):
                self.heard.set()

        scope = {"type": "http", "method": more.get("method", "POST"), "path": path, "headers": headers}
        self.task = asyncio.create_task(layer(scope, receive, send))

    async def leave(self) -> None:
        self.left.set()
        await self.task

    async def reply(self) -> tuple[int, Any]:
        """Status and body, which is parsed if it is JSON."""
        await self.task
        body = b"".join(message.get("body", b"") for message in self.sent)
        try:
            return self.sent[0]["status"], json.loads(body)
        except ValueError:
            return self.sent[0]["status"], body.decode()


class Rig:
    """A layer around a pretend app, and the sessions of a test."""

    def __init__(self, *texts: str, max_body: int = MAX_BODY) -> None:
        self.app = PretendApp(list(texts) or ["yes<|im_end|>"])
        dialects = {kind.path: kind(self.app) for kind in (PlainChat, Anthropic)}
        self.layer = SessionLayer(self.app, dialects, MODEL, max_body, structlog.get_logger())
        self._log = SessionsLog(structlog.get_logger())

    def session(self, max_model_len: int = 400, **limits: Any) -> AgentSession:
        allowed = SessionLimits(**({"max_response_tokens": 300, "max_turns": 10} | limits))
        session = AgentSession(allowed, TEMPLATE, max_model_len, "http://127.0.0.1:1", self._log)
        self.layer.add(session)
        return session

    async def close(self, session: AgentSession) -> None:
        await session.close()
        self.layer.remove(session)

    def ask(self, session: AgentSession, *texts: str, path: str = CHAT, **more: Any) -> Client:
        """Ask with a conversation: user and assistant in turn."""
        roles = ["user", "assistant"] * len(texts)
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        body = {"messages": messages} | more.pop("body", {})
        return Client(self.layer, path, session.key, body, **more)


def in_session(*texts: str, **limits: Any) -> Callable[[Any], Any]:
    """Plays a test with a rig whose model says these texts, and a session of it."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[tuple[Rig, AgentSession]]:
        rig = Rig(*texts)
        yield rig, rig.session(**limits)

    return within(opened, gives=2)
