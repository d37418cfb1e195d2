"""Metrics as TensorBoard event files: what runs of earlier releases have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from launcher.folder.series import Column, Histogram

MISSING = "the metrics of this run are TensorBoard files, which need a package: pip install 'spo-trainer[metrics]'"


class EventFiles:
    """A folder with a subfolder of event files for each process.

    Attributes:
        note: why nothing can be read, where that has a remedy.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: list[tuple[str, int]] = []
        self._processes: dict[str, Any] = {}
        self.note = ""

    def changed(self) -> bool:
        """Whether any file has grown, come or gone since the last time."""
        files = []
        for path in sorted(self._folder.glob("*/events.out.tfevents.*")):
            try:
                files.append((str(path), path.stat().st_size))
            except OSError:
                continue  # removed in the meantime
        if files == self._seen:
            return False
        self._seen = files
        self._load(sorted({Path(path).parent for path, _ in files}))
        return True

    def columns(self) -> Iterator[tuple[str, str, Column]]:
        """Process, name and values of each scalar."""
        for process, events in self._processes.items():
            for name in events.Tags()["scalars"]:
                column = Column()
                for event in events.Scalars(name):
                    column.add(event.step, event.wall_time, event.value)
                yield process, name, column

    def histograms(self) -> Iterator[tuple[str, str, Histogram]]:
        """Process, name and one version of each histogram."""
        for process, events in self._processes.items():
            for name in events.Tags()["histograms"]:
                for event in events.Histograms(name):
                    value = event.histogram_value
                    limits = np.array(value.bucket_limit, float)
                    edges = np.concatenate([[min(value.min, limits[0]) - 0.5], limits])
                    yield process, name, Histogram(event.step, event.wall_time, edges, np.array(value.bucket, float))

    def _load(self, folders: list[Path]) -> None:
        self._processes, self.note = {}, ""
        if not folders:
            return
        try:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        except ImportError:
            self.note = MISSING
            return
        for folder in folders:
            events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
            try:
                events.Reload()
            except Exception:
                # Whatever is wrong with the files of one process, the others have theirs.
                continue
            self._processes[folder.name] = events
