"""A local sandbox over HTTP, by SandboxFusion's API: POST /run_code; besides, GET /health and GET /metrics."""

from __future__ import annotations

import asyncio
import hmac
import time
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sandbox_client.errors import RequestRefused, SandboxUnavailable
from sandbox_client.protocol import Sandbox
from sandbox_client.types import RunCodeRequest, RunCodeResponse, Status


class Service:
    """Answers requests; what does not run yet waits, up to a bound.

    Args:
        concurrency: programs at once.
        queue: requests that may wait.
        max_bytes: of a request's body.
        isolated: what /health says.
        token: required as `Authorization: Bearer`, but for /health; None: of nobody.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        log: Any,
        *,
        concurrency: int,
        queue: int,
        max_bytes: int,
        token: str | None = None,
        isolated: bool = True,
    ) -> None:
        self.sandbox = sandbox
        self.log = log
        self.concurrency = concurrency
        self.queue = queue
        self.max_bytes = max_bytes
        self.token = token
        self.isolated = isolated
        self.stopping = False
        self.slots = asyncio.Semaphore(concurrency)
        self.running = 0
        self.refused = 0
        self.runs = dict.fromkeys(Status, 0)
        self.seconds = 0.0
        self.jobs: set[asyncio.Task[RunCodeResponse]] = set()
        self.waiting: set[asyncio.Task[RunCodeResponse]] = set()

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/run_code", self.run_code, methods=["POST"]),
                Route("/health", self.health, methods=["GET"]),
                Route("/metrics", self.metrics, methods=["GET"]),
            ]
        )

    async def run_code(self, request: Request) -> Response:
        """Run a program.

        401: wrong token; 413: too long; 422: not a request, or none that can run here; 503: full, or stopping.
        """
        if not self.allowed(request):
            return problem(401, "the bearer token is missing or wrong")
        body = await self.body(request)
        if body is None:
            return problem(413, f"the request is longer than {self.max_bytes} bytes")
        try:
            wanted = RunCodeRequest.model_validate_json(body)
        except ValidationError as error:
            return problem(422, problems_of(error))
        if self.stopping:
            return later("this sandbox is stopping")
        if len(self.jobs) >= self.concurrency + self.queue:
            self.refused += 1
            return later(f"{self.running} programs run and {len(self.waiting)} requests wait; no more are taken")
        job = asyncio.create_task(self.run(wanted))
        for jobs in (self.jobs, self.waiting):
            jobs.add(job)
            job.add_done_callback(jobs.discard)
        leaves = asyncio.create_task(gone(request))
        try:
            await asyncio.wait((job, leaves), return_when=asyncio.FIRST_COMPLETED)
        finally:  # whoever hangs up, or is hung up on, takes his program along
            leaves.cancel()
            job.cancel()
        await asyncio.wait((job,))
        if job.cancelled():
            return later("this sandbox is stopping")
        if isinstance(job.exception(), RequestRefused):
            return problem(422, str(job.exception()))
        return Response(job.result().model_dump_json(), media_type="application/json")

    async def run(self, wanted: RunCodeRequest) -> RunCodeResponse:
        """Wait for a slot, run, and count."""
        await self.slots.acquire()
        self.waiting -= {asyncio.current_task()}
        self.running += 1
        started = time.monotonic()
        try:
            answer = await self.sandbox.run_code(wanted)
        except RequestRefused:
            raise
        except SandboxUnavailable as error:
            self.log.warning("sandbox failed", reason=str(error))
            answer = RunCodeResponse(status=Status.SANDBOX_ERROR, message=str(error))
        finally:
            self.seconds += time.monotonic() - started
            self.running -= 1
            self.slots.release()
        self.runs[answer.status] += 1
        return answer

    def stop(self) -> None:
        """Take no more requests, and give up those that wait."""
        self.stopping = True
        for job in self.waiting:
            job.cancel()

    def kill(self) -> None:
        """Kill what runs."""
        for job in self.jobs:
            job.cancel()

    async def health(self, _: Request) -> Response:
        """Whether requests are taken."""
        said = {"status": "stopping" if self.stopping else "ok", "isolated": self.isolated}
        return JSONResponse(said, status_code=503 if self.stopping else 200)

    async def metrics(self, request: Request) -> Response:
        """Counts, in Prometheus' text format."""
        if not self.allowed(request):
            return problem(401, "the bearer token is missing or wrong")
        lines = ["# HELP spo_sandbox_runs_total Programs run.", "# TYPE spo_sandbox_runs_total counter"]
        lines += [f'spo_sandbox_runs_total{{status="{status}"}} {count}' for status, count in self.runs.items()]
        for name, kind, text, value in (
            ("refused_total", "counter", "Requests refused because the queue was full.", self.refused),
            ("run_seconds_total", "counter", "Wall time of all programs.", self.seconds),
            ("running", "gauge", "Programs under way.", self.running),
            ("queued", "gauge", "Requests that wait.", len(self.waiting)),
        ):
            lines += [
                f"# HELP spo_sandbox_{name} {text}",
                f"# TYPE spo_sandbox_{name} {kind}",
                f"spo_sandbox_{name} {value:g}",
            ]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    def allowed(self, request: Request) -> bool:
        """Whether the request carries the token; compared in constant time."""
        if self.token is None:
            return True
        given = request.headers.get("authorization", "").encode()
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())

    async def body(self, request: Request) -> bytes | None:
        """The request's body; None if it is too long, without reading all of it."""
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > self.max_bytes:
                return None
            parts.append(part)
        return b"".join(parts)


async def gone(request: Request) -> None:
    """Wait until the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error in one line."""
    return JSONResponse({"detail": message}, status_code=status, headers=headers)


def later(reason: str) -> Response:
    """Not now, but perhaps in a second."""
    return problem(503, reason, {"Retry-After": "1"})


def problems_of(error: ValidationError) -> str:
    """What is wrong with a request, without repeating it."""
    found = [
        f"{'.'.join(map(str, one['loc'])) or 'request'}: {one['msg']}" for one in error.errors(include_input=False)
    ]
    return "; ".join(found[:5])[:500]
