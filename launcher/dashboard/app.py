"""The web application of the dashboard: one page, its data as JSON, and a stream of what changes. It only reads."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from launcher.dashboard.episode_view import episode_view, shown
from launcher.dashboard.security import Guard
from launcher.dashboard.watch import Watch, WatchedRun
from launcher.folder.episode_query import KINDS, SORTS, Query, page
from launcher.folder.episodes import read_line
from launcher.folder.training_data import training_line

STATIC = Path(__file__).parent / "static"
MOST_ROWS = 200  # of a page of episodes
MOST_CHARS = 500  # of a text that is looked for


class Service:
    """Answers the page's requests."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.id = secrets.token_hex(4)  # by which a page notices that the server was started again

    def app(self, hosts: Iterable[str] = (), token: str | None = None, cookie: str = "spo") -> Starlette:
        """The ASGI application."""

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
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        guard = Middleware(Guard, hosts=list(hosts), token=token, cookie=cookie)
        return Starlette(routes=routes, middleware=[guard], lifespan=lifespan)

    def index(self, _: Request) -> Response:
        """The page."""
        return FileResponse(STATIC / "index.html")

    async def events(self, _: Request) -> Response:
        """Server-sent events: the statuses of all runs, now and whenever one has changed."""

        async def stream() -> AsyncIterator[str]:
            yield "retry: 1000\n\n"
            async for statuses in self.watch.changes():
                if statuses is None:
                    yield ": still here\n\n"
                else:
                    yield f"data: {json.dumps({'server': self.id, 'runs': statuses})}\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    def panels(self, request: Request) -> Response:
        """All panels of a run."""
        return _json(shown(self._run(request).panels()))

    def words(self, request: Request) -> Response:
        """What the episodes of a run can be filtered by."""
        index = self._run(request).episodes
        return _json(shown({"kinds": KINDS, "sorts": SORTS, "reasons": index.reasons.all[1:200],
                            "generators": index.generators.all[1:200]}))  # fmt: skip

    def episodes(self, request: Request) -> Response:
        """A page of the episodes that fit a query."""
        given = request.query_params
        query = Query(
            kind=_one_of(given.get("kind", ""), ("", *KINDS)),
            least=_number(given.get("least")),
            most=_number(given.get("most")),
            reason=given.get("reason", ""),
            generator=given.get("generator", ""),
            version=_whole(given.get("version")),
            first_step=_whole(given.get("first_step")),
            last_step=_whole(given.get("last_step")),
            text=given.get("text", "")[:MOST_CHARS],
            prompt=given.get("prompt", ""),
            sort=_one_of(given.get("sort", "-step"), (*SORTS, *(f"-{name}" for name in SORTS))),
        )
        start, count = _whole(given.get("start")) or 0, _whole(given.get("count")) or 50
        index = self._run(request).episodes
        found = page(index, query, max(0, start), min(max(1, count), MOST_ROWS))
        return _json({"rows": shown(found.rows), "total": found.total, "next": found.next, "all": len(index.rows())})

    def episode(self, request: Request) -> Response:
        """One episode, by its file and the offset of its line."""
        run = self._run(request)
        row = run.episodes.find(request.query_params.get("file", ""), _whole(request.query_params.get("offset")) or 0)
        record = None if row is None else read_line(*run.episodes.place(row))
        if record is None:
            raise HTTPException(404, "this episode is not there any more")
        return _json(episode_view(record, _model(run), training_line(run.folder.path, record)))

    def _run(self, request: Request) -> WatchedRun:
        run = self.watch.runs.get(request.query_params.get("run", ""))
        if run is None:
            raise HTTPException(404, f"no such run; there are {', '.join(self.watch.runs)}")
        return run


def _json(value: Any) -> Response:
    # Half a surrogate pair is escaped before, so that UTF-8 has everything.
    data = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(data, media_type="application/json")


def _model(run: WatchedRun) -> str | None:
    model = run.folder.config().get("model")
    path = model.get("path") if isinstance(model, dict) else None
    return path if isinstance(path, str) else None


def _one_of(value: str, allowed: Iterable[str]) -> str:
    if value not in allowed:
        raise HTTPException(400, f"{value!r} is not one of {', '.join(filter(None, allowed))}")
    return value


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise HTTPException(400, f"{text!r} is no number") from None


def _whole(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise HTTPException(400, f"{text!r} is no whole number")
    return int(text)
