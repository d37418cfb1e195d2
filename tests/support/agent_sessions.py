"""The layer of the agents' endpoint around an app of the test's own, with clients that leave and come again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import structlog

from generator.agents.client import CURRENT
from generator.agents.exchange import AsgiMessage
from generator.agents.layer import SessionLayer
from generator.agents.session import AgentRequest, RequestRefused, Session, SessionLimits
from tests.support.episode import TEMPLATE, TOKENIZER, completion

MODEL = "policy"
MAX_BODY = 1 << 16
CHAT = "/v1/chat/completions"


class PlainChat:
    """A dialect whose bodies are chat messages, and whose replies are one message or its text in pieces."""

    errors = "openai"

    def __init__(self, app: PretendApp) -> None:
        self._app = app

    def app(self, request: AgentRequest, prompt_ids: list[int]) -> Any:
        body = request.body | {"kv_transfer_params": {"prompt_token_ids": prompt_ids}}

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            await self._app.answer(body, scope, send)

        return answer

    def read(self, body: dict[str, Any], ignore: Collection[str] = ()) -> AgentRequest:
        if not isinstance(body.get("messages"), list):
            raise RequestRefused("messages: Field required")
        sampling = {"temperature": body.get("temperature")}
        ignored = tuple(name for name in ignore if name in body)
        return AgentRequest(body["messages"], {}, bool(body.get("stream")), sampling, ignored, body)

    def reply(self, body: bytes, streamed: bool) -> dict[str, Any] | None:
        text = body.decode() if streamed else json.loads(body)["content"]
        return {"role": "assistant", "content": text} if text else None


class Anthropic(PlainChat):
    errors = "anthropic"


@dataclass
class PretendApp:
    """Says `texts`, one a request and the last one over and over, once `gate` is open.

    Attributes:
        forwarded: the bodies that reached it.
        scopes: what else did.
        fail: raised in place of a reply.
        deaf: it does not end when its request is cut.
    """

    texts: list[str] = field(default_factory=lambda: ["yes<|im_end|>"])
    forwarded: list[dict[str, Any]] = field(default_factory=list)
    scopes: list[Any] = field(default_factory=list)
    fail: Exception | None = None
    status: int = 200
    deaf: bool = False
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    entered: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.answer(None, scope, send)

    async def answer(self, body: Any, scope: Any, send: Any) -> None:
        self.scopes.append(scope)
        session, exchange = CURRENT.get()
        self.entered.set()
        if self.fail is not None:
            raise self.fail
        if exchange.node is None:
            await self._send(send, [b"{}"])
            return
        self.forwarded.append(body)
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        shown = text.removesuffix("<|im_end|>").encode()
        start = {"type": "http.response.start", "status": self.status, "headers": []}
        if body.get("stream"):
            await send(start)
            await send({"type": "http.response.body", "body": shown[:1], "more_body": True})
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
        if body.get("stream"):
            await send({"type": "http.response.body", "body": shown[1:]})
        else:
            await self._send(send, [json.dumps({"content": shown.decode()}).encode()])

    async def _send(self, send: Any, parts: list[bytes]) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        for part in parts[:-1]:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": parts[-1]})


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
        """Status and body; JSON where it is that."""
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
        dialects = {CHAT: PlainChat(self.app), "/v1/messages": Anthropic(self.app)}
        self.layer = SessionLayer(self.app, dialects, MODEL, max_body, structlog.get_logger())

    def session(self, max_model_len: int = 400, **limits: Any) -> Session:
        allowed = SessionLimits(**({"max_response_tokens": 300, "max_turns": 10} | limits))
        session = Session(
            allowed, TEMPLATE, max_model_len, "http://127.0.0.1:1", structlog.get_logger(), on_close=self.layer.remove
        )
        self.layer.add(session)
        return session

    def ask(self, session: Session, *texts: str, path: str = CHAT, **more: Any) -> Client:
        """Ask with a conversation: user and assistant in turn."""
        roles = ["user", "assistant"] * len(texts)
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        body = {"messages": messages} | more.pop("body", {})
        return Client(self.layer, path, session.key, body, **more)
