"""Refused requests of agents: the exception, the error that a client is sent, and what a session keeps of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from generator.agents.exchange import Send

MOST_WARNINGS = 100  # in all, for one log
DIFFERENT_REFUSALS = 50  # that a session counts separately
NAMED_REFUSALS = 3  # that a message names
RETRIED = {408, 429}
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class Refusal(Exception):
    """A request that is answered with an error; `is_limit`: see `Refused`."""

    def __init__(self, status: int, message: str, code: str | None = None, is_limit: bool = False) -> None:
        super().__init__(message)
        self.status, self.code, self.is_limit = status, code, is_limit

    def text(self, style: str) -> str:
        """The message for clients of OpenAI's or Anthropic's API; clients recognise some errors by their wording."""
        return str(self)


class ContextTooLong(Refusal):
    """A conversation has more tokens than the context holds; clients then shorten it."""

    def __init__(self, tokens: int, limit: int) -> None:
        message = f"This model's maximum context length is {limit} tokens. Your messages have {tokens} tokens."
        super().__init__(400, message, "context_length_exceeded", is_limit=True)
        self.tokens, self.limit = tokens, limit

    def text(self, style: str) -> str:
        if style == "anthropic":
            return f"prompt is too long: {self.tokens} tokens > {self.limit} maximum"
        return str(self)


class Refused(NamedTuple):
    """The endpoint's answer to a request that it refused."""

    status: int
    path: str
    message: str
    is_limit: bool = False  # the request is beyond a limit of the session or of the model; the model has caused it

    @property
    def is_fault(self) -> bool:
        """Whether the endpoint, not the agent, is at fault: the same request might be accepted a moment later."""
        return not self.is_limit and (self.status in RETRIED or self.status >= 500)

    def __str__(self) -> str:
        return f"{self.status} for {self.path}: {self.message}"


class SessionsLog:
    """The log of all sessions, which logs each warning only once, since thousands of sessions may cause it."""

    def __init__(self, log: Any) -> None:
        self.info = log.info
        self._log, self._logged = log, set[str]()

    def warn_once(self, event: str, **details: Any) -> None:
        line = repr((event, details))
        if line not in self._logged and len(self._logged) < MOST_WARNINGS:
            self._logged.add(line)
            self._log.warning(event, **details)


class Refusals:
    """The refused requests of one session."""

    def __init__(self, log: SessionsLog) -> None:
        self.counts: Counter[Refused] = Counter()  # how often each refusal was answered
        self.counted = 0  # how many requests were refused, without those beyond a limit
        self.fault: Refused | None = None  # the endpoint's last fault; None once a later request is answered
        self._fault_at = 0
        self._log = log

    def add(self, refused: Refused, taken: int) -> None:
        """Count a refusal.

        Args:
            taken: how many requests the session had accepted before.
        """
        if refused in self.counts or len(self.counts) < DIFFERENT_REFUSALS:
            self.counts[refused] += 1
        if refused.is_fault:
            self.fault, self._fault_at = refused, taken
        if not refused.is_limit:
            self.counted += 1
            self._log.warn_once("the endpoint refused an agent's request", answered=str(refused))

    def answered(self, number: int) -> None:
        """Forget the fault if it is older than the answered request, before which `number` requests were accepted."""
        if number >= self._fault_at:
            self.fault = None

    def shown(self) -> str:
        """The most frequent refusals, in one line."""
        most = self.counts.most_common(NAMED_REFUSALS)
        others = len(self.counts) - len(most)
        named = "; ".join(f"{times} × {refused}" for refused, times in most)
        return named + (f"; and {others} others" if others else "")

    def records(self) -> list[dict[str, Any]]:
        """The refusals as plain data, for the record of the episode."""
        return [
            {"times": times, "status": refused.status, "path": refused.path, "message": refused.message}
            for refused, times in self.counts.items()
        ]


async def send_error(send: Send, style: str, refusal: Refusal) -> None:
    """Send a client the error of its refused request, in the shape of its API."""
    kind = ERROR_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": refusal.text(style)}
    if style == "openai":
        error |= {"param": None, "code": refusal.code}
    body = {"error": error} if style == "openai" else {"type": "error", "error": error}
    again = b"true" if refusal.status in RETRIED else b"false"  # SDKs ask for this before they look at the status
    await send_json(send, refusal.status, body, [(b"x-should-retry", again), (b"connection", b"close")])


async def send_json(send: Send, status: int, value: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    body = json.dumps(value).encode()
    all_headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})
