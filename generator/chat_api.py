"""A client of any OpenAI-compatible server: its chat, for simulated users and judges, and other paths for teachers."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import ssl
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from common.errors import UserError, one_line
from common.messages import Failure
from common.network import (
    Retries,
    RetriesExhausted,
    RetryableError,
    excerpt,
    is_loopback_url,
    read_at_most,
    retry_after,
)

T = TypeVar("T")

MAX_BYTES = 1 << 20  # of one answer; a chat reply is short
LONGEST_PAUSE = 30.0  # seconds between attempts, even if the server asks for more
RETRIED = frozenset({408, 409, 425, 429})  # and every 5xx except `NOT_IMPLEMENTED`
NOT_IMPLEMENTED = 501  # another attempt would get the same answer


class ChatUnavailable(Exception):
    """The endpoint gave no usable answer. This is an infrastructure failure: it never becomes a reward.

    `status` is the HTTP status of a refusal, 0 if there was none.
    """

    failure = Failure.CHAT_UNAVAILABLE

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class ModelApi:
    """One server; safe to share between all episodes of an event loop.

    Args:
        base_url: its address up to `/v1`, for example http://127.0.0.1:8000/v1; or `unix:` and the path of a socket.
        api_key_env: environment variable with the key, which is sent as a bearer token and never shown.
        concurrency: maximum number of requests at the same time; further ones wait.
        timeout: seconds for one attempt, from sending to the last byte.
        attempts: tries before `ChatUnavailable`.
        backoff: seconds before the second try, doubled each time and shortened at random by up to half.
        seconds: time limit for all tries and the pauses between them; if None, there is no limit.

    Raises:
        UserError: the variable is not set, or a value is impossible.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key_env: str | None = None,
        concurrency: int = 32,
        timeout: float = 60.0,
        attempts: int = 4,
        backoff: float = 0.5,
        seconds: float | None = None,
    ) -> None:
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise UserError(f"api_key_env = {api_key_env!r}: no such environment variable is set here")
        self._key = os.environ[api_key_env] if api_key_env else None
        # Otherwise each request would fail, and the error would quote the key.
        if self._key and not (self._key.isascii() and self._key.isprintable()):
            raise UserError(
                f"api_key_env = {api_key_env!r}: its value has characters that a header cannot carry, such as a line "
                "break at its end; allowed: printable ASCII"
            )
        base_url = str(base_url)
        socket = base_url.removeprefix("unix:") if base_url.startswith("unix:") else None
        base_url = base_url if socket is None else "http://localhost/v1"
        if not base_url.startswith(("http://", "https://")):
            raise UserError(f"base_url = {base_url!r} must start with http:// or https://")
        if not _has_host(base_url):
            raise UserError(f"base_url = {base_url!r} must be of the form http://host:port/v1 or https://host:port/v1")
        if concurrency < 1 or attempts < 1 or not timeout > 0:
            raise UserError(
                f"concurrency = {concurrency}, attempts = {attempts} and timeout = {timeout} must be above 0"
            )
        self.base_url = base_url.rstrip("/")
        self._timeout, self._seconds = timeout, seconds
        self._retries = Retries(attempts, backoff, LONGEST_PAUSE, LONGEST_PAUSE)
        self._slots = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        # Without TLS and without a proxy, no certificates are needed.
        plain = base_url.startswith("http://") and is_loopback_url(base_url)
        certificates = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else _certificates()
        try:
            self._client = httpx.AsyncClient(
                # A short compressed answer could expand to a very long one.
                headers={"Accept-Encoding": "identity"}
                | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
                verify=certificates,
                # A server on this machine is reached directly, even if its address is not in `no_proxy`.
                trust_env=not is_loopback_url(base_url),
                timeout=timeout,
                limits=limits,
                transport=None
                if socket is None
                else httpx.AsyncHTTPTransport(verify=certificates, uds=socket, limits=limits),
            )
        # The environment names a SOCKS proxy, an unknown kind of proxy, or something other than an address.
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise UserError(
                f"base_url = {base_url!r} is behind the environment's proxy: {one_line(str(error))}"
            ) from None

    async def ask(self, url: str, body: dict[str, Any] | None, read: Callable[[bytes], T], most: int = MAX_BYTES) -> T:
        """Send a request and return `read(answer)`.

        Args:
            body: posted as JSON; None sends a GET.
            read: raises `RetryableError` for an answer that cannot be used.
            most: largest answer that is read, in bytes.

        Raises:
            ChatUnavailable: the server refused, or no attempt got a usable answer.
        """
        content = None if body is None else json.dumps(body).encode()

        async def attempt() -> T:
            async with self._slots:
                return read(await self._attempt(url, content, most))

        try:
            return await self._retries(attempt, self._seconds)
        except RetriesExhausted as last:
            raise self._unavailable(url, str(last)) from None

    async def close(self) -> None:
        await self._client.aclose()

    async def _attempt(self, url: str, content: bytes | None, most: int) -> bytes:
        """Send one request; raises `RetryableError` if another may help, else `ChatUnavailable`."""
        method = "GET" if content is None else "POST"
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._client.stream(method, url, content=content, headers=headers) as response,
            ):
                data = await read_at_most(response.aiter_bytes(), most + 1)
        except TimeoutError:
            raise RetryableError(f"no answer within {self._timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise RetryableError(f"{type(error).__name__}: {excerpt(str(error))}") from None
        status = response.status_code
        if status in RETRIED or (status >= 500 and status != NOT_IMPLEMENTED):
            raise RetryableError(
                f"HTTP {status}: {excerpt(data)}", retry_after(response.headers.get("retry-after", ""))
            )
        if status != 200:
            raise self._unavailable(url, f"HTTP {status}: {excerpt(data)}", status)
        if len(data) > most:
            raise RetryableError(f"the answer is longer than {most} bytes")
        return data

    def _unavailable(self, url: str, reason: str, status: int = 0) -> ChatUnavailable:
        # A server may quote the key in its refusal.
        shown = reason.replace(self._key, "***") if self._key else reason
        return ChatUnavailable(f"{url}: {shown}", status)


class ChatApi(ModelApi):
    """The chat of one model at a server.

    Args:
        model: the model's name at the server.
        connection: see `ModelApi`.
    """

    def __init__(self, base_url: str, model: str, **connection: Any) -> None:
        super().__init__(base_url, **connection)
        self.model = model

    async def complete(self, messages: list[dict[str, Any]], **parameters: Any) -> str:
        """Get the model's reply to a conversation; `parameters` (temperature, max_tokens, ...) are sent unchanged.

        Raises `ChatUnavailable` like `ask`.
        """
        body = {"model": self.model, "messages": messages, **parameters}
        return await self.ask(f"{self.base_url}/chat/completions", body, _reply)


def _has_host(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")
    except (httpx.InvalidURL, UnicodeError):
        return False
    return bool(parsed.host) and (parsed.port or 0) < 65536


@functools.cache
def _certificates() -> ssl.SSLContext:
    try:
        return httpx.create_ssl_context()  # takes 0.1 s, as it reads all certificates
    except OSError as error:
        file = os.environ.get("SSL_CERT_FILE")
        shown = f"SSL_CERT_FILE = {file!r}" if file else "this machine"
        raise UserError(f"the certificates of {shown} cannot be read: {error.strerror or error}") from None


def _reply(data: bytes) -> str:
    try:
        text = json.loads(data)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise RetryableError(f"not a chat completion: {excerpt(data)}") from None
    if not isinstance(text, str) or not text.strip():
        raise RetryableError("the reply has no text")
    return text
