"""The metrics of a run folder: `metrics.jsonl`, or the TensorBoard files of a run of an earlier release."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic_core import from_json

from launcher.folder.appended_lines import AppendedLines
from launcher.folder.event_files import EventFiles
from launcher.folder.series import EMPTY, Column, Histogram, Histograms, Series

FILE = "metrics.jsonl"
FIRST = ("sampler", "learner")  # of processes, whose metrics are meant where several have one


class Entry(NamedTuple):
    """One line: what a process measured at a time, and the weight version it belongs to."""

    time: float
    version: int
    process: str
    values: Mapping[str, float]
    histograms: Mapping[str, tuple[np.ndarray, np.ndarray]]


class Metrics:
    """Metrics of one run; `update` reads what was written since.

    Attributes:
        unreadable: lines that were no entries.
        generation: changes when all that was read before is forgotten, since the file was replaced or emptied.
        from_event_files: whether they were read from TensorBoard files.
        note: why nothing can be read, where that has a remedy.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = AppendedLines(folder / FILE)
        self._events = EventFiles(folder / "tensorboard")
        self.generation = 0
        self._forget()

    def update(self) -> bool:
        """Read what is new; returns whether anything has changed."""
        changed = self._lines.rewound()
        if changed:
            self._forget()
        for _, line in self._lines.read():
            entry = read_entry(line)
            if entry is None:
                self.unreadable += 1
            else:
                if self.from_event_files:
                    self._forget()
                self._add(entry)
                changed = True
        if not self._columns or self.from_event_files:
            changed |= self._update_from_event_files()
        return changed

    def processes(self) -> list[str]:
        """Names of the processes that have written anything: sampler, learner, then the others."""
        names = {process for process, _ in (*self._columns, *self._histograms)}
        return sorted(names, key=_order)

    def names(self, process: str | None = None) -> list[str]:
        """Names of the metrics of a process, or of all of them."""
        return sorted({name for of, name in self._columns if process in (None, of)})

    def series(self, name: str, process: str | None = None) -> Series:
        """The last value of each version, by version; empty where there is none.

        Args:
            process: by default the first of `processes` that has the metric.
        """
        column = self._columns.get((self._owner(name, process), name))
        return column.by_version() if column else EMPTY

    def timeline(self, name: str, process: str | None = None) -> Series:
        """Every value in the order of writing, for what is measured by time."""
        column = self._columns.get((self._owner(name, process), name))
        return column.in_order() if column else EMPTY

    def histograms(self, name: str, process: str | None = None) -> list[Histogram]:
        """The last histogram of each version, by version."""
        owners = [process] if process is not None else self.processes()
        of_name = next((self._histograms[owner, name] for owner in owners if (owner, name) in self._histograms), None)
        return of_name.by_version() if of_name else []

    def last(self, name: str, process: str | None = None) -> float | None:
        """The value written last; None where there is none."""
        column = self._columns.get((self._owner(name, process), name))
        return column.values[-1] if column else None

    def last_version(self, process: str) -> int | None:
        """The newest weight version that a process wrote something of."""
        return max((column.versions[-1] for (of, _), column in self._columns.items() if of == process), default=None)

    def last_time(self, process: str) -> float | None:
        """When a process wrote last, in Unix seconds."""
        times = [column.times[-1] for (of, _), column in self._columns.items() if of == process]
        return max(times, default=None)

    def _owner(self, name: str, process: str | None) -> str:
        if process is not None:
            return process
        owners = [of for of, own_name in self._columns if own_name == name]
        return min(owners, key=_order, default="")

    def _add(self, entry: Entry) -> None:
        for name, value in entry.values.items():
            self._columns.setdefault((entry.process, name), Column()).add(entry.version, entry.time, value)
        for name, (edges, counts) in entry.histograms.items():
            histogram = Histogram(entry.version, entry.time, edges, counts)
            self._histograms.setdefault((entry.process, name), Histograms()).add(histogram)

    def _forget(self) -> None:
        self._columns: dict[tuple[str, str], Column] = {}
        self._histograms: dict[tuple[str, str], Histograms] = {}
        self.unreadable = 0
        self.from_event_files = False
        self.note = ""
        self.generation += 1

    def _update_from_event_files(self) -> bool:
        """Read them all again where any has changed: runs of earlier releases are over."""
        if not self._events.changed():
            return False
        self._forget()
        for process, name, column in self._events.columns():
            self._columns[process, name] = column
        for process, name, histogram in self._events.histograms():
            self._histograms.setdefault((process, name), Histograms()).add(histogram)
        self.note = self._events.note
        self.from_event_files = bool(self._columns)
        return True


def read_metrics(folder: Path) -> Metrics:
    """The metrics of a run folder as they are now; a folder without any gives none."""
    metrics = Metrics(folder)
    metrics.update()
    return metrics


def read_entry(line: bytes) -> Entry | None:
    """An entry of metrics.jsonl; None where the line is none. What cannot be used of an entry is left out."""
    try:
        record = from_json(line, cache_strings="keys")
        time, version, process = float(record["time"]), int(record["version"]), record["process"]
        if not isinstance(process, str):
            return None
        values = {name: float(value) for name, value in _items(record.get("values")) if _is_number(value)}
        return Entry(time, version, process, values, dict(_read_histograms(record.get("histograms"))))
    except (ValueError, LookupError, TypeError, OverflowError, AttributeError):
        return None


def _read_histograms(record: Any) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    for name, histogram in _items(record):
        try:
            edges, counts = np.array(histogram["edges"], float), np.array(histogram["counts"], float)
        except (ValueError, LookupError, TypeError):
            continue
        if edges.ndim == counts.ndim == 1 and len(edges) == len(counts) + 1:
            yield name, (edges, counts)


def _items(record: Any) -> Any:
    return record.items() if isinstance(record, dict) else ()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _order(process: str) -> tuple[int, str, int]:
    """Sampler and learner first; generator-2 before generator-10."""
    match = re.fullmatch(r"(.*?)-?(\d{1,18})", process)
    name, number = (match[1], int(match[2])) if match else (process, -1)
    return (FIRST.index(name) if name in FIRST else len(FIRST), name, number)
