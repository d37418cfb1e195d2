"""A client of any OpenAI-compatible `/chat/completions`, for simulated users and judges."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import ssl
from typing import Any

import httpx

from common.errors import UserError
from common.network import Retries, RetriesExhausted, RetryableError, excerpt, read_at_most, retry_after

MAX_BYTES = 1 << 20  # of one answer; a chat reply is short
LONGEST_PAUSE = 30.0  # seconds between attempts, even if the server asks for more
RETRIED = frozenset({408, 409, 425, 429})  # and every 5xx


class ChatUnavailable(Exception):
    """The endpoint gave no usable answer. This is infrastructure: it never becomes a reward."""


class ChatApi:
    """One endpoint and model; safe to share between all episodes of an event loop.

    Args:
        base_url: the part before `/chat/completions`, for example http://127.0.0.1:8000/v1.
        model: the model's name at the endpoint.
        api_key_env: environment variable with the key, which is sent as a bearer token and never shown.
        concurrency: requests at the same time; more wait for their turn.
        timeout: seconds for one attempt, from sending to the last byte.
        attempts: tries before `ChatUnavailable`.
        backoff: seconds before the second try, doubled each time and shortened at random by up to half.

    Raises:
        UserError: the variable is not set, or a value is impossible.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        concurrency: int = 32,
        timeout: float = 60.0,
        attempts: int = 4,
        backoff: float = 0.5,
    ) -> None:
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise UserError(f"api_key_env = {api_key_env!r}: no such environment variable is set here")
        if not str(base_url).startswith(("http://", "https://")):
            raise UserError(f"base_url = {base_url!r} must start with http:// or https://")
        if concurrency < 1 or attempts < 1 or timeout <= 0:
            raise UserError(
                f"concurrency = {concurrency}, attempts = {attempts} and timeout = {timeout} must be above 0"
            )
        self.url = f"{base_url.rstrip('/')}/chat/completions"
        self.model = model
        self._key = os.environ[api_key_env] if api_key_env else None
        self._timeout = timeout
        self._retries = Retries(attempts, backoff, LONGEST_PAUSE, LONGEST_PAUSE)
        self._slots = asyncio.Semaphore(concurrency)
        self._client = httpx.AsyncClient(
            # A short compressed answer could expand to a very long one.
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            verify=_certificates(),
            timeout=timeout,
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )

    async def complete(self, messages: list[dict[str, Any]], **parameters: Any) -> str:
        """Get the model's reply to a conversation; `parameters` (temperature, max_tokens, ...) are sent unchanged.

        Raises:
            ChatUnavailable: the endpoint refused, or no attempt got a usable answer.
        """
        body = json.dumps({"model": self.model, "messages": messages, **parameters}).encode()

        async def attempt() -> str:
            async with self._slots:
                return await self._attempt(body)

        try:
            return await self._retries(attempt)
        except RetriesExhausted as last:
            raise self._unavailable(str(last)) from None

    async def close(self) -> None:
        await self._client.aclose()

    async def _attempt(self, body: bytes) -> str:
        """Send one request; raises `RetryableError` if another may help, else `ChatUnavailable`."""
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._client.stream("POST", self.url, content=body, headers=headers) as response,
            ):
                data = await read_at_most(response.aiter_bytes(), MAX_BYTES + 1)
        except TimeoutError:
            raise RetryableError(f"no answer within {self._timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise RetryableError(f"{type(error).__name__}: {excerpt(str(error))}") from None
        status = response.status_code
        if status in RETRIED or status >= 500:
            raise RetryableError(
                f"HTTP {status}: {excerpt(data)}", retry_after(response.headers.get("retry-after", ""))
            )
        if status != 200:
            raise self._unavailable(f"HTTP {status}: {excerpt(data)}")
        return _reply(data)

    def _unavailable(self, reason: str) -> ChatUnavailable:
        # A server may quote the key in its refusal.
        shown = reason.replace(self._key, "***") if self._key else reason
        return ChatUnavailable(f"{self.url}: {shown}")


@functools.cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # takes 0.1 s, as it reads all certificates


def _reply(data: bytes) -> str:
    if len(data) > MAX_BYTES:
        raise RetryableError(f"the answer is longer than {MAX_BYTES} bytes")
    try:
        text = json.loads(data)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise RetryableError(f"not a chat completion: {excerpt(data)}") from None
    if not isinstance(text, str) or not text.strip():
        raise RetryableError("the reply has no text")
    return text
