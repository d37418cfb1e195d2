"""A local sandbox over HTTP, with SandboxFusion's API: POST /run_code, GET /health and GET /metrics."""

from __future__ import annotations

import asyncio
import hmac
import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from common.network import header_host, is_loopback, read_at_most
from sandbox_client.settings import Settings
from sandbox_client.types import RequestRefused, RunCodeRequest, RunCodeResponse, Sandbox, SandboxUnavailable, Status

BODY_TIMEOUT = 60.0  # seconds


class SandboxService:
    """Answers requests. Those that cannot run yet wait in a queue of limited length.

    Args:
        settings: how many programs run at a time, how many requests may wait and how long they may be.
        token: required as `Authorization: Bearer`, except for /health. If None, no token is required, but web pages in
            a browser of this machine are refused.
    """

    def __init__(self, sandbox: Sandbox, settings: Settings, token: str | None, log: Any) -> None:
        self.sandbox = sandbox
        self.settings = settings
        self.token = token
        self.log = log
        self.max_bytes = 2 * settings.files_mb << 20
        self.stopping = False
        self.slots = asyncio.Semaphore(settings.workers)
        self.running = 0
        self.reading = 0
        self.completed = 0
        self.jobs: set[asyncio.Task[RunCodeResponse]] = set()
        self.waiting: set[asyncio.Task[RunCodeResponse]] = set()
        self.registry = CollectorRegistry()
        self.runs = Counter("spo_sandbox_runs", "Programs run.", ["status"], registry=self.registry)
        for status in Status:
            self.runs.labels(status)
        self.refused = Counter(
            "spo_sandbox_refused", "Requests refused because the queue was full.", registry=self.registry
        )
        self.run_seconds = Counter("spo_sandbox_run_seconds", "Wall time of all programs.", registry=self.registry)
        running = Gauge("spo_sandbox_running", "Programs that run.", registry=self.registry)
        running.set_function(lambda: self.running)
        queued = Gauge("spo_sandbox_queued", "Requests that wait.", registry=self.registry)
        queued.set_function(lambda: len(self.waiting))

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/run_code", self.run_code, methods=["POST"]),
                Route("/health", self.health, methods=["GET"]),
                Route("/metrics", self.metrics, methods=["GET"]),
            ]
        )

    async def run_code(self, request: Request) -> Response:
        """Run a program.

        401: wrong token; 403: from a web page; 408: too slow; 413: too long; 415: not JSON; 422: invalid request, or
        one that cannot run here; 503: full, or stopping.
        """
        if refusal := self.refusal(request):
            return refusal
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return _error_response(415, "the request's Content-Type must be application/json")
        if self.stopping:
            return _retry_later("this sandbox is stopping")
        # Checked before the body is read, so that bodies in memory are limited as programs are.
        if len(self.jobs) + self.reading >= self.settings.workers + self.settings.queue:
            self.refused.inc()
            return _retry_later(f"{self.running} programs run and {len(self.waiting)} requests wait; the queue is full")
        self.reading += 1
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                body = await read_at_most(request.stream(), self.max_bytes + 1)
        except TimeoutError:
            return _error_response(
                408, f"the request was not complete after {BODY_TIMEOUT:g} s", {"Connection": "close"}
            )
        finally:
            self.reading -= 1
        if len(body) > self.max_bytes:
            return _error_response(413, f"the request is longer than {self.max_bytes} bytes")
        try:
            program = RunCodeRequest.model_validate_json(body)
        except ValidationError as error:
            return _error_response(422, _describe(error))
        if self.stopping:
            return _retry_later("this sandbox is stopping")
        job = asyncio.create_task(self.run(program))
        for jobs in (self.jobs, self.waiting):
            jobs.add(job)
            job.add_done_callback(jobs.discard)
        disconnect = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((job, disconnect), return_when=asyncio.FIRST_COMPLETED)
        finally:  # a client that disconnects, or is disconnected, ends its program
            disconnect.cancel()
            job.cancel()
        await asyncio.wait((job,))
        if job.cancelled():
            return _retry_later("this sandbox is stopping")
        if isinstance(job.exception(), RequestRefused):
            return _error_response(422, str(job.exception()))
        return Response(job.result().model_dump_json(), media_type="application/json")

    async def run(self, program: RunCodeRequest) -> RunCodeResponse:
        """Wait for a free slot, run the program and count it."""
        await self.slots.acquire()
        self.waiting -= {asyncio.current_task()}
        self.running += 1
        started = time.monotonic()
        try:
            answer = await self.sandbox.run_code(program)
        except RequestRefused:
            raise
        except SandboxUnavailable as error:
            self.log.warning("sandbox failed", reason=str(error))
            answer = RunCodeResponse(status=Status.SANDBOX_ERROR, message=str(error))
        finally:
            self.run_seconds.inc(time.monotonic() - started)
            self.running -= 1
            self.slots.release()
        self.completed += 1
        self.runs.labels(answer.status).inc()
        return answer

    def stop(self) -> None:
        """Accept no more requests, and cancel those that wait."""
        self.stopping = True
        for job in self.waiting:
            job.cancel()

    def kill(self) -> None:
        for job in self.jobs:
            job.cancel()

    async def health(self, _: Request) -> Response:
        state = {"status": "stopping" if self.stopping else "ok", "isolated": self.settings.isolated}
        return JSONResponse(state, status_code=503 if self.stopping else 200)

    async def metrics(self, request: Request) -> Response:
        if refusal := self.refusal(request):
            return refusal
        return Response(generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def refusal(self, request: Request) -> Response | None:
        """The answer to a request that may not be served; if it may, its connection is admitted.

        Without a token any web page could post programs from a browser of this machine: across sites, which its
        `Origin` shows, or as its own site, if its host name leads to this machine (DNS rebinding).
        """
        headers = request.headers
        if self.token is not None:
            shown = headers.get("authorization", "").encode()  # compared in constant time
            if not hmac.compare_digest(shown, f"Bearer {self.token}".encode()):
                return _error_response(401, "the bearer token is missing or wrong")
        elif "origin" in headers:
            return _error_response(403, "this server has no token, so it refuses requests from web pages (Origin)")
        elif not is_loopback(header_host(host := headers.get("host", ""))):
            reason = f"this server has no token, so requests must be to localhost or 127.0.0.1, not to {host[:100]!r}"
            return _error_response(403, reason)
        request.scope.get("state", {}).get("admit", lambda: None)()
        return None


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"detail": message}, status_code=status, headers=headers)


def _retry_later(reason: str) -> Response:
    """A 503 that asks the client to try again in a second."""
    return _error_response(503, reason, {"Retry-After": "1"})


def _describe(error: ValidationError) -> str:
    """The problems of a request in one line, without its content."""
    problems = error.errors(include_input=False)[:5]
    return "; ".join(f"{'.'.join(map(str, each['loc'])) or 'request'}: {each['msg']}" for each in problems)[:500]
