"""The web server of the dashboard: one page, its data as JSON, and a stream of updates. It never writes."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from common.connections import Connections, ServerWithoutSignals
from common.errors import UserError
from common.process import raise_file_limit
from launcher.dashboard.security import Guard
from launcher.dashboard.watch import Watch
from launcher.folder.episodes import read_line
from launcher.folder.query import FIELDS, Query, page
from launcher.folder.run import Run
from launcher.page.episode import episode_view, shown, training_lines
from launcher.page.html import page_html
from launcher.page.panels import panels

MOST_ROWS = 200  # in a page of episodes
MOST_CHARS = 500  # in a field of a query


class Service:
    """Answers the page's requests from the runs that a `Watch` follows."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.id = secrets.token_hex(4)  # by which a page notices that the server was restarted

    def app(self, hosts: Iterable[str] = (), token: str | None = None, cookie: str = "spo") -> Starlette:
        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            await self.watch.start()
            yield
            await self.watch.stop()

        routes = [
            Route("/", self.index),
            Route("/api/events", self.events),
            Route("/api/panels", self.panels),
            Route("/api/words", self.words),
            Route("/api/episodes", self.episodes),
            Route("/api/episode", self.episode),
        ]
        guard = Middleware(Guard, hosts=list(hosts), token=token, cookie=cookie)
        return Starlette(routes=routes, middleware=[guard], lifespan=lifespan)

    def index(self, _: Request) -> Response:
        return HTMLResponse(page_html())

    async def events(self, _: Request) -> Response:
        """Stream the statuses of all runs as server-sent events, at once and after each change."""

        async def stream() -> AsyncIterator[str]:
            yield "retry: 1000\n\n"
            async for statuses in self.watch.changes():
                if statuses is None:
                    yield ": still here\n\n"
                else:
                    yield f"data: {json.dumps({'server': self.id, 'runs': statuses})}\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    def panels(self, request: Request) -> Response:
        return _json(shown(panels(self._run(request))))

    def words(self, request: Request) -> Response:
        """The reasons and generators by which a run's episodes can be filtered."""
        index = self._run(request).episodes
        return _json(shown({"reasons": index.reasons.all[1:200], "generators": index.generators.all[1:200]}))

    def episodes(self, request: Request) -> Response:
        index, fields = self._run(request).episodes, request.query_params
        try:
            query = Query(**{name: fields[name][:MOST_CHARS] for name in FIELDS if fields.get(name)})
        except UserError as error:
            raise HTTPException(400, str(error)) from None
        start, count = _whole(fields.get("start", "0")), _whole(fields.get("count", "50"))
        chosen = page(index, query, start, min(max(1, count), MOST_ROWS))
        return _json({"rows": shown(chosen.rows), "total": chosen.total, "next": chosen.next})

    def episode(self, request: Request) -> Response:
        """The episode at an offset of a file."""
        run, fields = self._run(request), request.query_params
        row = run.episodes.find(fields.get("file", ""), _whole(fields.get("offset", "0")))
        record = None if row is None else read_line(*run.episodes.place(row))
        if record is None:
            raise HTTPException(404, "this episode no longer exists")
        return _json(episode_view(record, run.model(), training_lines(run.folder.path, record)))

    def _run(self, request: Request) -> Run:
        run = self.watch.runs.get(request.query_params.get("run", ""))
        if run is None:
            raise HTTPException(404, f"no such run; there are {', '.join(self.watch.runs)}")
        return run


def _json(value: Any) -> Response:
    # Lone surrogates were escaped before, so "replace" should never apply.
    data = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(data, media_type="application/json")


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise HTTPException(400, f"{text!r} is not a whole number")
    return int(text)


class Server(ServerWithoutSignals):
    """A server that ends the event streams before it waits for requests."""

    def __init__(self, app: Starlette, watch: Watch, connections: Connections | None = None) -> None:
        http = (connections or Connections(most=raise_file_limit() // 4)).protocol()
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, ws="none", http=http, timeout_graceful_shutdown=5
            )
        )
        self._watch = watch

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._watch.stop()
        await super().shutdown(sockets)


async def serve(app: Starlette, watch: Watch, listener: socket.socket) -> None:
    """Answer requests on a socket until SIGINT or SIGTERM."""
    server = Server(app, watch)

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    await server.serve([listener])
