"""The ASGI layer before vLLM's app: who may ask, what may be asked, and what a request continues.

It takes any app, and knows vLLM only through the dialects that it is given. Nothing of a client's path, query or
headers reaches the app: each request is made anew from its route and its checked body.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from generator.agents.client import CURRENT
from generator.agents.exchange import App, AsgiMessage, Exchange, Receive, Send
from generator.agents.session import (
    AgentRequest,
    ContextTooLong,
    Refused,
    RequestRefused,
    RewardRefused,
    Session,
    SessionOver,
)
from generator.chat.template import Message, TemplateFailed
from generator.concurrency import LONG_TEXT, offload

BODY_SECONDS = 30.0  # until a body must be complete
MAX_IN_FLIGHT = 128  # requests of one session, those whose bodies are still being read included
CLOSED_KEYS = 1 << 16  # sessions that are over and still known as such
DIFFERENT = 100  # lines of a kind that are logged
REWARD = "/v1/reward"
# Beside the dialects: reading, which samples nothing.
PLAIN = {("GET", "/v1/models"), ("POST", "/v1/messages/count_tokens")}

_PATH = re.compile(r"(?:/s/([A-Za-z0-9_-]+))?(/v1/[a-z_/]+)")


class Dialect(Protocol):
    """What the layer asks of a dialect; see `generator.agents.dialects`."""

    errors: str

    def read(self, body: dict[str, Any], ignore: Collection[str] = ()) -> AgentRequest: ...

    def app(self, request: AgentRequest, prompt_ids: list[int]) -> App: ...

    def reply(self, body: bytes, streamed: bool) -> Message | None: ...


class Refusal(Exception):
    """An answer that is an error; `is_limit`: see `Refused`."""

    def __init__(self, status: int, message: str, code: str | None = None, is_limit: bool = False) -> None:
        super().__init__(message)
        self.status, self.code, self.is_limit = status, code, is_limit


class SessionLayer:
    """Answers requests of sessions by an app.

    Args:
        model: the only name that requests may ask for.
        max_body: bytes.

    Attributes:
        strangers: requests with a key of no session.
        refused: requests that were refused, theirs included; those beyond a limit are not.
    """

    def __init__(self, app: App, dialects: Mapping[str, Dialect], model: str, max_body: int, log: Any) -> None:
        self._app, self._dialects, self._model, self._max_body, self._log = app, dialects, model, max_body, log
        self._sessions: dict[str, Session] = {}
        self._rewards: dict[str, Session] = {}
        self._closed: dict[str, None] = {}  # keys of sessions that are gone, oldest first
        self._said: set[str] = set()
        self.strangers = self.refused = 0

    def add(self, session: Session) -> None:
        self._sessions[session.key] = session
        self._rewards[session.reward_key] = session

    def remove(self, session: Session) -> None:
        """Forget a session, except that its keys are over."""
        for keys, key in ((self._sessions, session.key), (self._rewards, session.reward_key)):
            if keys.pop(key, None) is not None:
                self._closed[key] = None
        while len(self._closed) > CLOSED_KEYS:
            del self._closed[next(iter(self._closed))]

    @property
    def sessions(self) -> list[Session]:
        return list(self._sessions.values())

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no upgrade to a WebSocket is ever accepted
        match = _PATH.fullmatch(scope["path"])
        path = match[2] if match else ""
        style = getattr(
            self._dialects.get(path), "errors", "anthropic" if path.startswith("/v1/messages") else "openai"
        )
        session: Session | None = None
        try:
            headers = _headers(scope)
            session = self._session((match[1] if match else None) or _key(headers), path)
            scope.get("state", {}).get("admit", lambda owner: None)(session.key)
            await self._answer(session, scope["method"], path, headers, receive, send)
        except Refusal as refusal:
            self._note(session, Refused(refusal.status, scope["path"], str(refusal), refusal.is_limit))
            await _send_error(send, style, refusal)

    def _session(self, key: str, path: str) -> Session:
        keys = self._rewards if path == REWARD else self._sessions
        session = keys.get(key)
        if session is not None and (path == REWARD or not session.over.is_set()):
            return session
        if session is not None or key in self._closed:
            raise Refusal(409, f"this session is over: {session.reason}" if session else "this session is over")
        raise Refusal(401, "the API key is of no session here")

    async def _answer(
        self, session: Session, method: str, path: str, headers: dict[str, str], receive: Receive, send: Send
    ) -> None:
        dialect = self._dialects.get(path)
        if dialect is None and (method, path) not in PLAIN and path != REWARD:
            raise Refusal(404, "there is no such path here")
        if method != "POST" and (method, path) not in PLAIN:
            raise Refusal(405, "the method must be POST")
        if session.in_flight >= MAX_IN_FLIGHT:
            raise Refusal(429, f"{MAX_IN_FLIGHT} requests of this session are in flight")
        session.in_flight += 1
        try:
            body = await self._body(receive) if method == "POST" else b""
            if path == REWARD:
                await self._take_reward(session, body, send)
                return
            parsed = _parsed(body) if method == "POST" else {}
            if dialect is None:
                exchange = Exchange(b"", streamed=False)
                self._start(exchange, session, self._app, method, path, body)
            else:
                exchange = await self._exchange(session, path, dialect, parsed, body, headers)
            await self._follow(exchange, session, receive, send)
        finally:
            session.in_flight -= 1

    async def _exchange(
        self, session: Session, path: str, dialect: Dialect, parsed: Any, body: bytes, headers: dict[str, str]
    ) -> Exchange:
        """The exchange of a request for tokens: a new one, or an earlier one whose reply nobody has heard."""
        fingerprint = hashlib.blake2b(path.encode() + b"\0" + body, digest_size=16).digest()
        retry = session.retried(fingerprint, headers.get("x-stainless-retry-count", "0") != "0")
        if retry is not None:
            return retry
        if parsed.get("model") not in (None, self._model):
            shown = str(parsed["model"])[:100]
            raise Refusal(
                404, f"the model `{shown}` does not exist; this endpoint has `{self._model}`", "model_not_found"
            )
        try:
            request = await offload(len(body) > LONG_TEXT, dialect.read, parsed, session.limits.ignore)
            self._say_once("fields of agents' requests are ignored", path=path, fields=request.ignored)
            node = await session.begin(request)
        except (RequestRefused, TemplateFailed) as error:
            raise Refusal(400, str(error)) from None
        except SessionOver as error:
            raise Refusal(409, str(error), is_limit=True) from None
        except ContextTooLong as error:
            raise _too_long(error, dialect.errors) from None
        exchange = Exchange(fingerprint, request.streamed, node)
        app = dialect.app(request, node.prompt_ids().tolist())

        def on_end() -> None:
            status, reply = exchange.body()
            if status == 200 and node.turn is not None:
                session.answer(node, dialect.reply(reply, request.streamed))
            else:
                session.drop(node)
                if status >= 400 and not session.over.is_set():
                    self._note(session, Refused(status, path, _error_in(reply)))

        self._start(exchange, session, app, "POST", path, b"", on_end)
        return exchange

    def _start(
        self,
        exchange: Exchange,
        session: Session,
        app: App,
        method: str,
        path: str,
        body: bytes,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
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
            "app": self._app,
        }
        token = CURRENT.set((session, exchange))  # the exchange's task gets a copy of it
        try:
            exchange.start(app, scope, body, on_end)
        finally:
            CURRENT.reset(token)
        if exchange.node is not None:
            session.keep(exchange)

    def _note(self, session: Session | None, refused: Refused) -> None:
        """Note a refusal with its session; one of no session is counted alone, and of one that is over not at all."""
        if session is None and refused.status != 401:
            return
        self.refused += not refused.is_limit
        if session is None:
            self.strangers += 1
            return
        match = _PATH.fullmatch(refused.path)  # the key may stand in front
        refused = refused._replace(path=(match[2] if match else refused.path)[:100])
        session.refused(refused)
        if not refused.is_limit:
            self._say_once("the endpoint refused an agent's request", answered=str(refused))

    def _say_once(self, event: str, **details: Any) -> None:
        """Log what would otherwise be logged with each of a thousand sessions; empty details are nothing to say."""
        known = repr((event, details))
        if all(details.values()) and known not in self._said and len(self._said) < DIFFERENT:
            self._said.add(known)
            self._log.warning(event, **details)

    async def _follow(self, exchange: Exchange, session: Session, receive: Receive, send: Send) -> None:
        if await exchange.follow(receive, send):
            return
        # The app ended without a word.
        if session.over.is_set() and session.failure is None:
            raise Refusal(409, f"this session is over: {session.reason}", is_limit=True)
        self._log.warning("the endpoint's app failed", error=repr(exchange.failure))
        raise Refusal(500, "the engine failed")

    async def _body(self, receive: Receive) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(400, "the request was not complete")
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self._max_body:
                        raise Refusal(413, f"the request is longer than {self._max_body} bytes")
        except TimeoutError:
            raise Refusal(408, f"the request was not complete after {BODY_SECONDS:g} s") from None
        return bytes(body)

    async def _take_reward(self, session: Session, body: bytes, send: Send) -> None:
        try:
            session.send_reward(_parsed(body).get("reward"))
        except RewardRefused as error:
            raise Refusal(400, str(error)) from None
        await _send_json(send, 200, {"reward": session.reward})


def _headers(scope: Any) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _key(headers: dict[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not valid JSON") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body must be a JSON object")
    return value


def _error_in(body: bytes) -> str:
    """The message of an error of vLLM's server, in one line."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = body[:500].decode(errors="replace")
    return " ".join(str(message).split())[:500]


def _too_long(error: ContextTooLong, style: str) -> Refusal:
    """The error by which clients of each dialect know that they must shorten the conversation."""
    if style == "anthropic":
        return Refusal(400, f"prompt is too long: {error.tokens} tokens > {error.limit} maximum", is_limit=True)
    return Refusal(400, str(error), "context_length_exceeded", is_limit=True)


RETRIED = {408, 429}
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


async def _send_error(send: Send, style: str, refusal: Refusal) -> None:
    kind = ERROR_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": str(refusal)}
    if style == "openai":
        error |= {"param": None, "code": refusal.code}
    body = {"error": error} if style == "openai" else {"type": "error", "error": error}
    again = b"true" if refusal.status in RETRIED else b"false"  # SDKs ask for this before they look at the status
    await _send_json(send, refusal.status, body, [(b"x-should-retry", again), (b"connection", b"close")])


async def _send_json(send: Send, status: int, value: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = json.dumps(value).encode()
    start: AsgiMessage = {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *(headers or ()),
        ],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})
