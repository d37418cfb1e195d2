"""Structured logs: short events with key=value, coloured for people or JSON for machines."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import structlog

from common.text import one_line, visible


def setup(role: str, *, json: bool | None = None, file: Path | None = None) -> Any:
    """Configure logging for this process and return its logger.

    Args:
        role: shown with every line: sampler, generator-1, learner, ...
        json: one JSON object a line; by default only if SPO_LOG=json.
        file: write there instead of stderr.
    """
    json = os.environ.get("SPO_LOG") == "json" if json is None else json
    stream: TextIO = sys.stderr if file is None else file.open("a", buffering=1, encoding="utf-8")
    renderer: Any = structlog.dev.ConsoleRenderer(
        colors=stream.isatty(), pad_event_to=0, exception_formatter=_visible_traceback
    )
    if json:
        renderer = structlog.processors.JSONRenderer()
    sys.excepthook = _print_exception
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso" if json else "%H:%M:%S", utc=json),
            *([structlog.processors.format_exc_info] if json else []),
            _rounded,
            # JSON escapes them itself.
            *([] if json else [_visible]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping().get(os.environ.get("SPO_LOG_LEVEL", "INFO").upper(), logging.INFO)
        ),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    return structlog.get_logger().bind(role=role)


def get_logger() -> Any:
    """The process's logger; before `setup` it writes to stdout as structlog does by default."""
    return structlog.get_logger()


def _visible(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Text that models, users and servers have written moves no cursor of whoever reads the log on a terminal."""
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
