"""The ASGI app in front of vLLM's: authentication, routes, and limits on what one session may send at a time."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

from generator.agents.dialect import Dialect
from generator.agents.exchange import App, Exchange, Receive, Send, fresh_request
from generator.agents.refusals import Refusal, Refused, send_error, send_json
from generator.agents.session import AgentSession
from generator.tools.toolbox import encodable

BODY_SECONDS = 30.0  # time limit for receiving a body
MAX_IN_FLIGHT = 128  # requests of one session, including those whose bodies are still being read
CLOSED_KEYS = 1 << 16  # keys of closed sessions that get "this session is over" instead of "unknown key"
REWARD = "/v1/reward"
# Requests that vLLM's app answers without sampling.
PLAIN = {("GET", "/v1/models"), ("POST", "/v1/messages/count_tokens")}

_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")  # of a surrogate pair; the other half may follow
_PATH = re.compile(r"(?:/s/([A-Za-z0-9_-]+))?(/v1/[a-z_/]+)")


class SessionLayer:
    """Answers requests of sessions: a dialect answers those for tokens, `app` the others.

    Args:
        model: the only model name that requests may give.
        max_body: limit on a body's length in bytes.
    """

    def __init__(self, app: App, dialects: Mapping[str, Dialect], model: str, max_body: int, log: Any) -> None:
        self._app, self._dialects, self._model, self._max_body, self._log = app, dialects, model, max_body, log
        self._sessions: dict[str, AgentSession] = {}
        self._rewards: dict[str, AgentSession] = {}
        self._closed: dict[str, None] = {}  # keys of removed sessions, oldest first
        self._refused = 0  # in removed sessions
        self.strangers = 0  # number of requests whose key belongs to no session

    def add(self, session: AgentSession) -> None:
        self._sessions[session.key] = session
        self._rewards[session.reward_key] = session

    def remove(self, session: AgentSession) -> None:
        """Forget a session, but remember that its keys were valid."""
        if self._sessions.pop(session.key, None) is None:
            return
        del self._rewards[session.reward_key]
        self._closed |= dict.fromkeys((session.key, session.reward_key))
        self._refused += session.refusals.counted
        while len(self._closed) > CLOSED_KEYS:
            del self._closed[next(iter(self._closed))]

    @property
    def sessions(self) -> list[AgentSession]:
        return list(self._sessions.values())

    @property
    def refused(self) -> int:
        """Number of refused requests: those of strangers are included, those beyond a limit are not."""
        return self.strangers + self._refused + sum(session.refusals.counted for session in self.sessions)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no upgrade to a WebSocket is ever accepted
        match = _PATH.fullmatch(scope["path"])
        path = match[2] if match else ""
        dialect = self._dialects.get(path)
        session: AgentSession | None = None
        try:
            headers = _headers(scope)
            session = self._session((match[1] if match else None) or _key(headers), path)
            # Count the connection as the session's, whose limit then applies to it (`common.connections`).
            scope.get("state", {}).get("admit", lambda owner: None)(session.key)
            await self._answer(session, scope["method"], path, headers, receive, send)
        except Refusal as refusal:
            style = dialect.errors if dialect else "anthropic" if path.startswith("/v1/messages") else "openai"
            if session is not None:
                shown = (path or scope["path"])[:100]
                session.count_refusal(Refused(refusal.status, shown, refusal.text(style), refusal.is_limit))
            elif refusal.status == 401:
                self.strangers += 1
            await send_error(send, style, refusal)

    def _session(self, key: str, path: str) -> AgentSession:
        keys = self._rewards if path == REWARD else self._sessions
        session = keys.get(key)
        # A session that has reached a limit still takes the agent's reward, until it is closed.
        if session is not None and (path == REWARD or not session.over.is_set()):
            return session
        if session is not None or key in self._closed:
            raise Refusal(409, f"this session is over: {session.reason}" if session else "this session is over")
        raise Refusal(401, "the API key belongs to no session of this endpoint")

    async def _answer(
        self, session: AgentSession, method: str, path: str, headers: dict[str, str], receive: Receive, send: Send
    ) -> None:
        dialect, is_plain = self._dialects.get(path), (method, path) in PLAIN
        if dialect is None and not is_plain and path != REWARD:
            raise Refusal(404, "there is no such path here")
        if method != "POST" and not is_plain:
            raise Refusal(405, "the method must be POST")
        if session.in_flight >= MAX_IN_FLIGHT:
            raise Refusal(429, f"{MAX_IN_FLIGHT} requests of this session are in flight")
        session.in_flight += 1
        try:
            raw = await self._body(receive) if method == "POST" else b""
            body = _parsed(raw) if method == "POST" else {}
            if path == REWARD:
                session.send_reward(body.get("reward"))
                await send_json(send, 200, {"reward": session.reward})
            elif dialect is None:
                await self._app(*fresh_request(self._app, method, path, raw), send)
            else:
                self._check_model(body)
                is_retry = headers.get("x-stainless-retry-count", "0") != "0"
                try:
                    exchange = await dialect.take(session, body, raw, is_retry)
                except Refusal:
                    raise
                except Exception as error:  # no reward may come of it, so the session must know
                    raise self._failed(error) from error
                await self._follow(exchange, session, receive, send)
        finally:
            session.in_flight -= 1

    def _check_model(self, body: dict[str, Any]) -> None:
        if body.get("model") not in (None, self._model):
            shown = f"`{str(body['model'])[:100]}`"
            raise Refusal(
                404, f"the model {shown} does not exist; this endpoint has `{self._model}`", "model_not_found"
            )

    async def _follow(self, exchange: Exchange, session: AgentSession, receive: Receive, send: Send) -> None:
        if await exchange.follow(receive, send):
            return
        # The reply ended before its first piece.
        if session.over.is_set() and session.failure is None:
            raise Refusal(409, f"this session is over: {session.reason}", is_limit=True)
        raise self._failed(exchange.failure)

    def _failed(self, error: Exception | None) -> Refusal:
        self._log.warning("the endpoint's app failed", error=repr(error))
        return Refusal(500, "the endpoint failed; the generator's log says why")

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


def _headers(scope: Any) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _key(headers: dict[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
        if _HALF_PAIR.search(body):
            # A client may cut a text within an emoji; tokenizers and records cannot encode the rest of it.
            value = json.loads(encodable(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not valid JSON") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body must be a JSON object")
    return value
