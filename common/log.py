"""Structured logs, and a timeline for `spo trace`.

Logs are short events with key=value: coloured text on a terminal, or JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, MutableMapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import structlog

from common.errors import one_line, visible

TIMELINE = "timeline"  # folder in the run folder
MAX_BYTES = 8 << 20  # of a file; the previous one is kept too


def setup(role: str, *, file: Path | None = None) -> Any:
    """Configure logging for this process and return its logger; with SPO_LOG=json each line is a JSON object.

    Args:
        role: shown with every line: sampler, generator-1, learner, ...
        file: write there instead of stderr.
    """
    stream: TextIO = sys.stderr if file is None else file.open("a", buffering=1, encoding="utf-8")
    sys.excepthook = _print_exception
    factory = structlog.PrintLoggerFactory(stream)
    structlog.configure(**_format(stream), logger_factory=factory, cache_logger_on_first_use=False)
    return structlog.get_logger().bind(role=role)


def to_file(role: str, file: Path) -> Any:
    """A logger that writes to a file as after `setup`; this process's own logging is not changed."""
    stream = file.open("a", buffering=1, encoding="utf-8")
    return structlog.wrap_logger(structlog.PrintLogger(stream), **_format(stream)).bind(role=role)


def _format(stream: TextIO) -> dict[str, Any]:
    as_json = os.environ.get("SPO_LOG") == "json"
    renderer: Any = structlog.dev.ConsoleRenderer(
        colors=stream.isatty(), pad_event_to=0, exception_formatter=_visible_traceback
    )
    if as_json:
        renderer = structlog.processors.JSONRenderer()
    processors = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json),
        *([structlog.processors.format_exc_info] if as_json else []),
        _rounded,
        # JSON escapes them itself.
        *([] if as_json else [_visible]),
        renderer,
    ]
    level = logging.getLevelNamesMapping().get(os.environ.get("SPO_LOG_LEVEL", "INFO").upper(), logging.INFO)
    return {"processors": processors, "wrapper_class": structlog.make_filtering_bound_logger(level)}


def get_logger() -> Any:
    """The process's logger; before `setup` it writes to stdout as structlog does by default."""
    return structlog.get_logger()


def _visible(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape what models, users and servers have written, so that it moves no cursor on a terminal."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = one_line(value)
        elif not isinstance(value, int | float | None) and key != "exc_info":
            event[key] = one_line(repr(value))
    return event


def _visible_traceback(stream: TextIO, exc_info: Any) -> None:
    stream.write("\n" + visible("".join(traceback.format_exception(*exc_info))).rstrip())


def _print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(visible("".join(traceback.format_exception(kind, error, trace))))


def _rounded(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Floats with four significant digits: a log is read, not computed with."""
    event.update({key: float(f"{value:.4g}") for key, value in event.items() if isinstance(value, float)})
    return event


class Timeline:
    """Appends slices and instants to a file, one line each; a full disk loses lines but stops nothing.

    Args:
        folder: of the run; None writes nothing.
        process: its name, which becomes the file's name.
    """

    def __init__(self, folder: Path | None, process: str, max_bytes: int = MAX_BYTES) -> None:
        name = process.replace("/", "_").lstrip(".")
        self._path = None if folder is None else folder / TIMELINE / f"{name}.jsonl"
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # a learner writes in two threads
        self._file: FileIO | None = None  # opened once: there may be thousands of lines a second

    def slice(self, name: str, start: float, end: float | None = None, lane: str = "", **details: Any) -> None:
        """Record something that lasted from `start` until `end`, by default now; in Unix seconds.

        Args:
            lane: the row that shows it; slices of a lane may overlap, as episodes do.
        """
        end = time.time() if end is None else end
        # If the clock was set back meanwhile, the length is 0, not negative.
        fields = {"name": name, "start": round(start, 6), "end": round(max(start, end), 6), "lane": lane}
        self._write(fields | details)

    def instant(self, name: str, **details: Any) -> None:
        self._write({"name": name, "start": round(time.time(), 6), **details})

    @contextlib.contextmanager
    def span(self, name: str, lane: str = "", **details: Any) -> Iterator[None]:
        """Record the block as a slice, however it ends."""
        start = time.time()
        try:
            yield
        finally:
            self.slice(name, start, lane=lane, **details)

    def _write(self, fields: dict[str, Any]) -> None:
        if self._path is None:
            return
        line = b"\n" + json.dumps(fields, separators=(",", ":")).encode()
        with self._lock, contextlib.suppress(OSError):
            if self._file is not None and self._file.tell() > self._max_bytes:
                self._file.close()
                self._file = None
                os.replace(self._path, self._path.with_suffix(".old.jsonl"))
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            # The line break comes first, so that a line truncated by a kill does not run into this one.
            self._file.write(line)
