"""Sends what is appended to `metrics.jsonl` to a tracker, in a thread of its own."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Any

from common.config import Config
from sampler.files.metrics_file import Entry, Span
from sampler.trackers.base import Tracker, open_tracker
from sampler.trackers.samples import EVALUATED, samples

READ = 256 << 10  # bytes
PAUSE = 30.0  # seconds before a tracker that has failed is tried again
LAST, LAST_OF_RUN = 4.0, 20.0  # seconds to send what is left when the sampler stops, and at the end of the run


class TrackerFeed:
    """Feeds one tracker from `metrics.jsonl`, and keeps its position in the run folder for the next sampler.

    The file is the queue: a tracker that is slow or unreachable costs no memory and catches up later; a new one gets
    everything from the file's beginning. Whatever a tracker does, the run continues.
    """

    def __init__(self, name: str, config: Config, file: Path, log: Any) -> None:
        self.name = name
        self._config, self._file, self._log = config, file, log
        self._place = file.parent / "trackers" / f"{name}.json"
        self._tracker: Tracker | None = None
        self._id, self._offset = self._restored()
        self._settled = self._offset
        self._sent: deque[tuple[float, int]] = deque()  # times and offsets of what is sent but not settled yet
        # Versions that the run went back to, and what was removed from the file then; not applied yet.
        self._discarded: deque[tuple[int, list[Span]]] = deque()
        self._finished = self._stopped = self._has_failed = self._is_full = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"to-{name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        if not self._has_failed:
            self._wake.set()

    def begin_new_file(self) -> None:
        """Note that the file was renamed and a new one begun: send the rest of the old one, then the new one."""
        self._is_full = True

    def discard(self, version: int, removed: list[Span]) -> None:
        """Note that the file was rewritten without the entries of later versions, which were at `removed`."""
        self._discarded.append((version, removed))
        self._wake.set()

    def stop(self, finished: bool) -> None:
        """Send the rest, and end; `finished` says whether the run is over."""
        self._finished, self._stopped = finished, True
        self._wake.set()

    def join(self) -> None:
        """Wait for the thread to end, for a limited time."""
        self._thread.join(LAST_OF_RUN if self._finished else LAST)
        if self._thread.is_alive() or self._left():
            self._log.warning("a tracker did not receive all metrics", tracker=self.name, bytes=self._left())

    def _run(self) -> None:
        file: IO[bytes] | None = None
        is_last = False
        while not is_last:
            self._wake.wait(PAUSE if self._has_failed else None)
            self._wake.clear()
            is_last = self._stopped
            try:
                if file is None or self._discarded:
                    file = self._reopened(file)
                if file is not None:
                    self._send(file)
                if self._is_full:
                    file = self._next(file)
            except Exception as error:  # libraries raise anything if their server or disk fails
                self._warn_once(error)
            else:
                if self._has_failed:
                    self._log.info("the tracker works again", tracker=self.name)
                self._has_failed = False
        try:
            if self._tracker is not None:
                self._tracker.close(self._finished)
                self._keep(all_of_it=True)
        except Exception as error:
            self._warn_once(error)

    def _warn_once(self, error: Exception) -> None:
        if not self._has_failed:
            reason = f"{type(error).__name__}: {error}"[:500]
            self._log.warning("a tracker has failed, the run continues", tracker=self.name, error=reason)
        self._has_failed = True

    def _reopened(self, file: IO[bytes] | None) -> IO[bytes] | None:
        """Open the file anew, and apply each `discard`; None if it does not exist yet."""
        if file is not None:
            file.close()
        while self._discarded:
            version, removed = self._discarded[0]
            if version == 0:
                self._begin_new_run()
            elif self._id or self._offset:
                self._opened().discard(version)
                # What the tracker has not got yet may be from before that version, and stay in the file.
                self._move(self._offset - sum(length for start, length in removed if start < self._offset))
            self._discarded.popleft()
        if not self._file.exists():
            return None
        opened = self._file.open("rb")
        if self._offset > os.fstat(opened.fileno()).st_size:
            self._move(0)  # the file was replaced
        return opened

    def _next(self, file: IO[bytes] | None) -> IO[bytes] | None:
        """Send the rest of a file that is full, then what the new one already has."""
        if file is not None:
            self._send(file)
        self._is_full = False
        self._move(0)
        opened = self._reopened(file)
        if opened is not None:
            self._send(opened)
        return opened

    def _begin_new_run(self) -> None:
        """A new run begins in this folder, so one begins in the tracker too."""
        if self._tracker is not None:
            self._tracker.close(False)
        self._tracker, self._id = None, ""
        self._move(0)
        self._keep()

    def _move(self, offset: int) -> None:
        self._offset = self._settled = offset
        self._sent.clear()

    def _send(self, file: IO[bytes]) -> None:
        while True:
            file.seek(self._offset)
            lines = [line for line in file.readlines(READ) if line.endswith(b"\n")]
            if not lines:
                return
            entries = [entry for line in lines if (entry := Entry.parse(line)) is not None]
            self._opened().log(entries)
            for entry in entries:
                if EVALUATED in entry.values and (rows := samples(self._file.parent, entry.version)):
                    self._opened().log_samples(entry.version, rows)
            self._offset += sum(map(len, lines))
            self._sent.append((time.monotonic(), self._offset))
            self._keep()

    def _opened(self) -> Tracker:
        if self._tracker is None:
            self._tracker = open_tracker(self.name, self._config, self._file.parent, self._id)
            self._id = self._tracker.id
            self._keep()
        return self._tracker

    def _left(self) -> int:
        """Bytes that are not sent."""
        return max(0, self._file.stat().st_size - self._offset) if self._file.exists() else 0

    def _restored(self) -> tuple[str, int]:
        try:
            kept = json.loads(self._place.read_text(encoding="utf-8"))
            return str(kept["id"]), int(kept["offset"])
        except (OSError, ValueError, LookupError, TypeError):
            return "", 0

    def _keep(self, all_of_it: bool = False) -> None:
        """Save where the next sampler continues: after the entries that a kill of this process can no longer lose."""
        settles = 0.0 if self._tracker is None or all_of_it else self._tracker.settles
        while self._sent and self._sent[0][0] <= time.monotonic() - settles:
            self._settled = self._sent.popleft()[1]
        new = self._place.with_suffix(".new")
        with contextlib.suppress(OSError):  # a full disk: after a restart, something is sent twice
            self._place.parent.mkdir(exist_ok=True)
            new.write_text(json.dumps({"id": self._id, "offset": self._settled}), encoding="utf-8")
            os.replace(new, self._place)
