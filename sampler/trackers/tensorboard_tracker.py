"""TensorBoard event files, one folder per process, without torch."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from common.config import Config, dump_config
from sampler.files.metrics_file import Entry, Histogram
from sampler.trackers.base import OWN, Tracker


class TensorBoardTracker(Tracker):
    """Writes each process's entries to `tensorboard/<process>`; without an id, first removes another run's files."""

    id = "tensorboard"

    def __init__(self, config: Config, folder: Path, run_id: str) -> None:
        self._folder = folder / "tensorboard"
        self._max_bytes = config.run.metrics_bytes
        if not run_id:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._writers: dict[str, EventFileWriter] = {}
        self._newest_step = 0
        indented = "".join(f"    {line}\n" for line in dump_config(config).splitlines())  # as code
        self._writer("sampler").add_event(Event(wall_time=time.time(), summary=text_pb("configuration", indented)))

    def log(self, entries: Sequence[Entry]) -> None:
        """Write entries; after an error the next call begins new files."""
        try:
            self._write(entries)
        except Exception:
            # A writer's thread ends with its first error, such as a full disk's, and the writer never works again.
            for writer in self._writers.values():
                with contextlib.suppress(Exception):
                    writer.close()
            self._writers.clear()
            raise

    def discard(self, version: int) -> None:
        for path in self._folder.iterdir():
            self._rewind(path.name, version)

    def close(self, finished: bool) -> None:
        for writer in self._writers.values():
            writer.close()

    def _write(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            # A restarted learner repeats steps. Its measurements by time may still carry the version before.
            if entry.process == "learner" and not all(name.startswith(OWN) for name in entry.values):
                if entry.version <= self._newest_step:
                    self._rewind("learner", entry.version - 1)
                self._newest_step = entry.version
            values = [Summary.Value(tag=name, simple_value=value) for name, value in entry.values.items()]
            values += [Summary.Value(tag=name, histo=_histogram(h)) for name, h in entry.histograms.items()]
            event = Event(wall_time=entry.time, step=entry.version, summary=Summary(value=values))
            self._writer(entry.process).add_event(event)
        for process, writer in [*self._writers.items()]:
            writer.flush()
            with contextlib.suppress(OSError):
                self._remove_oldest(process, writer)

    def _remove_oldest(self, process: str, writer: EventFileWriter) -> None:
        """Remove a process's oldest files if all are too large together; begin a new one early enough for that."""
        statuses = ((path, path.stat()) for path in Path(writer.get_logdir()).iterdir())
        files = sorted(((status.st_mtime, status.st_size, path) for path, status in statuses), reverse=True)
        if files[0][1] > self._max_bytes // 4:
            writer.close()
            del self._writers[process]
        total = 0
        for _, size, path in files:
            total += size
            if total > self._max_bytes and path != files[0][2]:
                path.unlink()

    def _rewind(self, process: str, version: int) -> None:
        log = SessionLog(status=SessionLog.START)
        self._writer(process).add_event(Event(step=version + 1, session_log=log))

    def _writer(self, process: str) -> EventFileWriter:
        if process not in self._writers:
            folder = self._folder / process.replace("/", "_").lstrip(".")
            self._writers[process] = EventFileWriter(str(folder), flush_secs=5)
        return self._writers[process]


def _histogram(histogram: Histogram) -> HistogramProto:
    edges, counts = histogram.edges, histogram.counts
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    return HistogramProto(
        min=edges[0],
        max=edges[-1],
        num=sum(counts),
        sum=sum(x * n for x, n in zip(middles, counts, strict=True)),
        sum_squares=sum(x * x * n for x, n in zip(middles, counts, strict=True)),
        bucket_limit=edges[1:],
        bucket=counts,
    )
