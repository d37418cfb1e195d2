"""TensorBoard event files as runs of earlier releases have them: `MetricsWriter` of that time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class MetricsWriter:
    """Writes scalars and histograms of one process into `folder`."""

    def __init__(self, folder: Path | str) -> None:
        self._writer = EventFileWriter(str(folder), flush_secs=5)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars by name at a step (the weight version)."""
        self._add(step, [Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()])

    def histogram(self, step: int, name: str, counts: Mapping[int, int]) -> None:
        """How often each whole number occurred, for example staleness in versions."""
        if not counts:
            return
        keys = sorted(counts)
        numbers = [float(counts[key]) for key in keys]
        histogram = HistogramProto(
            min=keys[0],
            max=keys[-1],
            num=sum(numbers),
            sum=sum(key * n for key, n in zip(keys, numbers, strict=True)),
            sum_squares=sum(key * key * n for key, n in zip(keys, numbers, strict=True)),
            bucket_limit=[key + 0.5 for key in keys],
            bucket=numbers,
        )
        self._add(step, [Summary.Value(tag=name, histo=histogram)])

    def rewind(self, step: int) -> None:
        """TensorBoard forgets what was written for this step and later ones: it will be written again."""
        log = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=log))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def _add(self, step: int, values: list[Any]) -> None:
        if values:
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
