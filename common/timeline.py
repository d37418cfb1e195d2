"""What a process did when: `timeline/<process>.jsonl` in the run folder, for `spo trace`."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

FOLDER = "timeline"
MAX_BYTES = 8 << 20  # of a file; one such is kept beside it


class Timeline:
    """Appends slices and instants, each a line that is written whole; a disk that is full costs only these.

    Args:
        folder: of the run; None writes nothing.
        process: by which the file is called.
    """

    def __init__(self, folder: Path | None, process: str, max_bytes: int = MAX_BYTES) -> None:
        name = process.replace("/", "_").lstrip(".")
        self._path = None if folder is None else folder / FOLDER / f"{name}.jsonl"
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # a learner writes in two threads
        self._file: FileIO | None = None  # opened once: thousands of short episodes a second are a line each

    def slice(self, name: str, start: float, end: float | None = None, lane: str = "", **details: Any) -> None:
        """Something took from `start` until `end`, by default now; in Unix seconds.

        Args:
            lane: shown below each other; slices of a lane may overlap, as episodes do.
        """
        end = time.time() if end is None else end
        # A clock that was set back makes nothing shorter than nothing.
        fields = {"name": name, "start": round(start, 6), "end": round(max(start, end), 6), "lane": lane}
        self._write(fields | details)

    def instant(self, name: str, **details: Any) -> None:
        """Something happened now."""
        self._write({"name": name, "start": round(time.time(), 6), **details})

    @contextlib.contextmanager
    def span(self, name: str, lane: str = "", **details: Any) -> Iterator[None]:
        """A slice of what happens within the block, however it ends."""
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
            # A line that a kill cut short ends where the next one begins.
            self._file.write(line)
