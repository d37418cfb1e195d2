"""Client of any server that speaks SandboxFusion's `POST /run_code`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from pydantic import ValidationError

from common.errors import UserError
from common.network import (
    Retries,
    RetriesExhausted,
    RetryableError,
    excerpt,
    read_at_most,
    retry_after,
    without_password,
)
from common.process import in_thread
from sandbox_client.types import (
    RequestRefused,
    RunCodeRequest,
    RunCodeResponse,
    SandboxUnavailable,
    SandboxUnreachable,
    Status,
)

PATH = "/run_code"
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0  # seconds between attempts
MAX_ANSWER = 32 << 20  # bytes; a longer answer is an error
MAX_REFUSAL = 64 << 10  # bytes read of an answer that is not a result
INLINE = 128 << 10  # bytes; longer answers are parsed off the event loop
RETRIED = frozenset({408, 429})  # too slow, too many
KEEP_ALIVE = 4.0  # seconds; uvicorn closes idle connections after 5
# Seconds between two attempts to connect: as long as the shortest pause between two attempts of one call, so that a
# single caller always tries, but a thousand callers do not make a thousand failing connections a second.
PROBE_INTERVAL = 0.25


class CircuitBreaker:
    """Opens when an attempt to connect fails; then one call per `PROBE_INTERVAL` tries again, and the others fail."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.is_open = False
        self._clock = clock
        self._probe_at = -math.inf
        self._reason = ""

    def check(self) -> None:
        """Return if the caller may try to connect; else raise `RetryableError` with the reason of the last failure."""
        if not self.is_open:
            return
        if self._clock() < self._probe_at:
            raise RetryableError(self._reason)
        self._probe_at = self._clock() + PROBE_INTERVAL

    def connection_failed(self, reason: str) -> None:
        self.is_open, self._reason, self._probe_at = True, reason, self._clock() + PROBE_INTERVAL

    async def trace(self, event: str, _: dict[str, Any]) -> None:
        """Close the breaker once httpx reports a connection, without waiting for the answer, which may take long."""
        if event == "connection.connect_tcp.complete":
            self.is_open = False


class SandboxClient:
    """Runs programs on a server. A process needs one client, which limits and reuses connections.

    An attempt may take the program's time limits plus `timeout` seconds. A call, which includes the wait for a slot and
    all attempts, may take those limits plus `deadline` seconds.

    Args:
        url: the server's, with or without `/run_code`.
        token: sent as `Authorization: Bearer`.
        concurrency: requests, and so open connections, at a time; further requests wait.
        clock, sleep: time in seconds, for tests.

    Raises:
        UserError: the URL or the token cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        concurrency: int = 128,
        timeout: float = 30.0,
        attempts: int = 5,
        deadline: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._url, self._server = _address(url)
        self._timeout, self._deadline = timeout, deadline
        self._retries = Retries(attempts, FIRST_PAUSE, LONGEST_PAUSE, clock=clock, sleep=sleep)
        self._slots = asyncio.Semaphore(concurrency)
        self._breaker = CircuitBreaker(clock)
        self._http = httpx.AsyncClient(
            headers=_headers(token),
            timeout=httpx.Timeout(None, connect=timeout),
            limits=httpx.Limits(
                max_connections=concurrency, max_keepalive_connections=concurrency, keepalive_expiry=KEEP_ALIVE
            ),
            verify=ssl.create_default_context(),
            trust_env=False,  # no proxy named in the environment may see programs and token
        )

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        """Run one program; the answer's status is never `SandboxError`.

        Raises:
            RequestRefused: the server refuses the request.
            SandboxUnavailable: no valid answer in all attempts.
        """
        body = json.dumps(request.model_dump()).encode()
        limits = request.compile_timeout + request.run_timeout

        async def attempt() -> RunCodeResponse:
            async with self._slots:
                self._breaker.check()
                return await self._attempt(body, limits + self._timeout)

        try:
            return await self._retries(attempt, limits + self._deadline)
        except RetriesExhausted as error:
            kind = SandboxUnreachable if self._breaker.is_open else SandboxUnavailable
            raise kind(f"{self}: {error}") from None

    def __str__(self) -> str:
        return f"sandbox {self._server}"

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> SandboxClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _attempt(self, body: bytes, seconds: float) -> RunCodeResponse:
        """Send a request; raises `RetryableError` or `TimeoutError` if another may help, else `SandboxUnavailable`."""
        extensions = {"trace": self._breaker.trace} if self._breaker.is_open else None
        request = self._http.stream("POST", self._url, content=body, extensions=extensions)
        try:
            async with asyncio.timeout(seconds), request as response:
                self._breaker.is_open = False  # httpx reports nothing of a connection that it reuses
                if response.status_code != 200:
                    text = b""
                    with contextlib.suppress(httpx.HTTPError):  # the status says enough
                        text = await read_at_most(response.aiter_raw(), MAX_REFUSAL)
                    self._raise_for_status(response, text)
                content = await read_at_most(response.aiter_raw(), MAX_ANSWER + 1)
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__}: {excerpt(str(error))}"
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                self._breaker.connection_failed(reason)
            raise RetryableError(reason) from None
        if len(content) > MAX_ANSWER:
            # Another attempt would get the same answer.
            raise SandboxUnavailable(f"{self}: the answer is longer than {MAX_ANSWER} bytes")
        if len(content) > INLINE:
            return await in_thread(_parse, content)
        return _parse(content)

    def _raise_for_status(self, response: httpx.Response, content: bytes) -> None:
        """Raise the exception that a status other than 200 stands for."""
        status = response.status_code
        reason = f"status {status}: {excerpt(content)}"
        if status in RETRIED or status >= 500:
            raise RetryableError(reason, retry_after(response.headers.get("retry-after", "")))
        raise RequestRefused(f"{self} refuses the request; {reason}")


def _address(url: str) -> tuple[str, str]:
    """URL to post to; host and port for messages, without a password."""
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")
        usable = parsed.scheme in ("http", "https") and parsed.host and (parsed.port or 0) < 65536
    except (httpx.InvalidURL, UnicodeError):
        usable = False
    if not usable:
        raise UserError(
            f"sandbox.url = {without_password(url)!r} must be of the form http://host:port or https://host:port"
        )
    return url.rstrip("/").removesuffix(PATH) + PATH, parsed.netloc.decode("ascii", "replace")


def _headers(token: str | None) -> dict[str, str]:
    # The size limit counts bytes before decompression: a compressed answer could be a thousand times longer.
    headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
    if token:
        if not (token.isascii() and token.isprintable()):
            raise UserError("sandbox.token has characters that a header cannot carry; allowed: printable ASCII")
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _parse(content: bytes) -> RunCodeResponse:
    """Parse a program's result; raises `RetryableError` if the answer has none."""
    try:
        answer = RunCodeResponse.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0] if error.error_count() < 100 else None
        where = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else f"{error.error_count()} problems"
        raise RetryableError(f"the answer is not a result ({excerpt(where)}): {excerpt(content)}") from None
    if answer.status is Status.SANDBOX_ERROR:
        raise RetryableError(f"SandboxError: {excerpt(answer.message)}")
    if answer.run_result is None and (answer.status is Status.SUCCESS or answer.compile_result is None):
        raise RetryableError(f"the answer is {answer.status} without a result of the program")
    return answer
