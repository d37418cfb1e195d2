"""Client of any server that speaks SandboxFusion's `POST /run_code`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType

import httpx
from pydantic import ValidationError

from common.errors import UserError
from common.retry import AskAgain, GaveUp, Retries, excerpt, read, retry_after
from common.threads import in_thread
from sandbox_client.outage import Outage
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
MAX_ANSWER = 32 << 20  # bytes; a longer answer is cut off
MAX_REFUSAL = 64 << 10  # bytes read of an answer that is not a result
INLINE = 128 << 10  # bytes; longer answers are parsed off the event loop
KEEP_ALIVE = 4.0  # seconds; uvicorn closes idle connections after 5


class SandboxClient:
    """Runs programs on a server. One client a process: it bounds and reuses connections.

    An attempt may take the program's own time limits and `timeout` seconds more; a call, waiting for a slot
    and all attempts included, may take those limits and `deadline` seconds more.

    Args:
        url: of the server, with or without `/run_code`.
        token: sent as `Authorization: Bearer`.
        concurrency: requests under way at a time, and so connections open; the others wait.
        memory_mb: limit of a program started with `run`, in MiB.
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
        memory_mb: int = 1024,
        deadline: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._url, self._server = _address(url)
        self._timeout, self._deadline, self._memory_mb = timeout, deadline, memory_mb
        self._retries = Retries(attempts, FIRST_PAUSE, LONGEST_PAUSE, clock=clock, sleep=sleep)
        self._slots = asyncio.Semaphore(concurrency)
        self._outage = Outage(clock)
        self._http = httpx.AsyncClient(
            headers=_headers(token),
            timeout=httpx.Timeout(None, connect=timeout),
            limits=httpx.Limits(
                max_connections=concurrency, max_keepalive_connections=concurrency, keepalive_expiry=KEEP_ALIVE
            ),
            verify=ssl.create_default_context(),
            trust_env=False,  # no proxy from the environment sees programs and token
        )

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        """Run one program; never an answer of status `SandboxError`.

        Raises:
            RequestRefused: the server refuses the request.
            SandboxUnavailable: no valid answer in all attempts.
        """
        body = json.dumps(request.model_dump()).encode()
        limits = request.compile_timeout + request.run_timeout

        async def attempt() -> RunCodeResponse:
            async with self._slots:
                self._outage.check()
                return await self._attempt(body, limits + self._timeout)

        try:
            return await self._retries(attempt, limits + self._deadline)
        except GaveUp as last:
            kind = SandboxUnreachable if self._outage.on else SandboxUnavailable
            raise kind(f"{self}: {last}") from None

    async def run(
        self,
        code: str,
        language: str = "python",
        *,
        stdin: str | None = None,
        compile_timeout: float = 10.0,
        run_timeout: float = 10.0,
        files: Mapping[str, str | None] | None = None,
        fetch_files: Sequence[str] = (),
    ) -> RunCodeResponse:
        """`run_code` with the request spelled out; `files` is content by path, base64."""
        return await self.run_code(
            RunCodeRequest(
                code=code,
                language=language,
                stdin=stdin,
                compile_timeout=compile_timeout,
                run_timeout=run_timeout,
                memory_limit_MB=self._memory_mb,
                files=dict(files or {}),
                fetch_files=list(fetch_files),
            )
        )

    def __str__(self) -> str:
        return f"sandbox {self._server}"

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> SandboxClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _attempt(self, body: bytes, seconds: float) -> RunCodeResponse:
        """One request; raises `AskAgain` or `TimeoutError` where another may help, else `SandboxUnavailable`."""
        traced = {"trace": self._outage.trace} if self._outage.on else None
        request = self._http.stream("POST", self._url, content=body, extensions=traced)
        try:
            async with asyncio.timeout(seconds), request as response:
                if response.status_code != 200:
                    text = b""
                    with contextlib.suppress(httpx.HTTPError):  # the status says enough
                        text = await read(response.aiter_raw(), MAX_REFUSAL)
                    self._refused(response, text)
                content = await read(response.aiter_raw(), MAX_ANSWER + 1)
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__}: {excerpt(str(error))}"
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                self._outage.begins(reason)
            raise AskAgain(reason) from None
        if len(content) > MAX_ANSWER:
            # The same program would write as much again.
            raise SandboxUnavailable(f"{self}: the answer is longer than {MAX_ANSWER} bytes")
        if len(content) > INLINE:
            return await in_thread(_parse, content)
        return _parse(content)

    def _refused(self, response: httpx.Response, content: bytes) -> None:
        """Raise what a status other than 200 means."""
        status = response.status_code
        reason = f"status {status}: {excerpt(content)}"
        if status == 429 or status >= 500:
            raise AskAgain(reason, retry_after(response.headers.get("retry-after", "")))
        raise RequestRefused(f"{self} refuses the request; {reason}")


def _address(url: str) -> tuple[str, str]:
    """(URL to post to, host and port as shown in messages: without a password)."""
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")
        usable = parsed.scheme in ("http", "https") and parsed.host and (parsed.port or 0) < 65536
    except (httpx.InvalidURL, UnicodeError):
        usable = False
    if not usable:
        raise UserError(f"sandbox.url = {url!r} must be of the form http://host:port or https://host:port")
    return url.rstrip("/").removesuffix(PATH) + PATH, parsed.netloc.decode("ascii", "replace")


def _headers(token: str | None) -> dict[str, str]:
    # A compressed answer could be a thousand times longer than what is counted.
    headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
    if token:
        if not (token.isascii() and token.isprintable()):
            raise UserError("sandbox.token has characters that a header cannot carry; allowed: printable ASCII")
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _parse(content: bytes) -> RunCodeResponse:
    """A result that says something about the program, or `AskAgain`."""
    try:
        answer = RunCodeResponse.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0] if error.error_count() < 100 else None
        where = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else f"{error.error_count()} problems"
        raise AskAgain(f"the answer is not a result ({excerpt(where)}): {excerpt(content)}") from None
    if answer.status is Status.SANDBOX_ERROR:
        raise AskAgain(f"SandboxError: {excerpt(answer.message)}")
    if answer.run_result is None and (answer.status is Status.SUCCESS or answer.compile_result is None):
        raise AskAgain(f"the answer is {answer.status} without a result of the program")
    return answer
