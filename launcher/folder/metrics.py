"""Reads the metrics in a run folder: for each process and name, a series of numbers or the newest histogram."""

from __future__ import annotations

import math
import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic_core import from_json

from launcher.folder.appended_lines import AppendedLines

FILE, OLD = "metrics.jsonl", "metrics.old.jsonl"
LARGEST = 1e300  # edge of a histogram; the width of all its bins must be a number
FIRST = ("sampler", "learner")  # they take precedence if several processes have a metric


class Series(NamedTuple):
    """One metric of one process."""

    versions: np.ndarray  # weight version that each value belongs to, int64 [N]
    times: np.ndarray  # Unix time in seconds at which it was written, float64 [N]
    values: np.ndarray  # float64 [N]; NaN if nothing could be measured

    def at(self) -> dict[int, float]:
        """The value of each version."""
        return dict(zip(self.versions.tolist(), self.values.tolist(), strict=True))


class Distribution(NamedTuple):
    """A histogram at a weight version: `edges` float64 [N + 1], `counts` [N]."""

    version: int
    edges: np.ndarray
    counts: np.ndarray


@dataclass(slots=True)
class Column:
    """All values of a metric in the order of writing: 24 bytes each."""

    versions: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, version: int, time: float, value: float) -> None:
        self.versions.append(version)
        self.times.append(time)
        self.values.append(value)

    def keep(self, newest: int) -> None:
        for one in (self.versions, self.times, self.values):
            del one[:-newest]

    def by_version(self) -> Series:
        """The last value of each version, by version."""
        written = self.in_order()
        versions, from_end = np.unique(written.versions[::-1], return_index=True)
        last = len(written.versions) - 1 - from_end
        return Series(versions, written.times[last], written.values[last])

    def in_order(self) -> Series:
        """Every value, in the order of writing."""
        # Copies, since an `array` cannot grow while numpy shares its memory.
        return Series(np.array(self.versions, np.int64), np.array(self.times), np.array(self.values))


class Metrics:
    """Metrics of one run; `update` reads new lines."""

    def __init__(self, folder: Path, newest: int | None = None) -> None:
        self._folder = folder
        self._newest = newest  # minimum number of values kept of each metric; None keeps all
        self._forget()

    def update(self) -> bool:
        """Read lines that were added; returns whether anything has changed."""
        changed = sum(lines.rewound() for lines in self._files) > 0
        if changed:
            self._forget()
        for lines in self._files:
            for _, text in lines.read():
                if self._add(text):
                    changed = True
                else:
                    self.unreadable += 1
        return changed

    def processes(self) -> list[str]:
        """Names of the processes that have written metrics: sampler, learner, then generators and relays."""
        names = {process for process, _ in (*self._columns, *self._histograms)}
        return sorted(names, key=_order)

    def names(self, process: str | None = None) -> list[str]:
        """Names of the metrics of a process, or of all of them."""
        return sorted({name for of, name in self._columns if process in (None, of)})

    def series(self, name: str, process: str | None = None) -> Series:
        """The last value of each version, by version, of a process or the first that has the metric; may be empty."""
        return self._column(name, process).by_version()

    def timeline(self, name: str, process: str | None = None) -> Series:
        """Every value in the order of writing, for metrics that are measured over time."""
        return self._column(name, process).in_order()

    def histogram(self, name: str) -> Distribution | None:
        """The histogram of the newest version; None if there is none."""
        owners = (process for process in self.processes() if (process, name) in self._histograms)
        return self._histograms.get((next(owners, ""), name))

    def last(self, name: str, process: str | None = None) -> float | None:
        """The value written last; None if there is none."""
        values = self._column(name, process).values
        return values[-1] if values else None

    def last_version(self, process: str) -> int | None:
        """The newest weight version for which a process wrote a metric."""
        return max((column.versions[-1] for (of, _), column in self._columns.items() if of == process), default=None)

    def last_time(self, process: str | None = None) -> float:
        """When a process, or any of them, wrote last, in Unix seconds; 0 if it never did."""
        times = (column.times[-1] for (of, _), column in self._columns.items() if process in (None, of))
        return max(times, default=0.0)

    def span(self) -> tuple[float, float]:
        """When sampler and learner wrote first and last, in Unix seconds; zeros if they never did."""
        times = [column.times for (process, _), column in self._columns.items() if process in FIRST]
        return (min(of[0] for of in times), max(of[-1] for of in times)) if times else (0.0, 0.0)

    def _column(self, name: str, process: str | None) -> Column:
        """An empty one if there is no such metric."""
        if process is None:
            process = min((of for of, own_name in self._columns if own_name == name), key=_order, default="")
        return self._columns.get((process, name)) or Column()

    def _add(self, text: bytes) -> bool:
        """Add the metrics of a line, without values that are not numbers; False if the line holds no metrics."""
        try:
            record = from_json(text, cache_strings="keys")
            time, version, process = float(record["time"]), int(record["version"]), record["process"]
            values = {name: float(value) for name, value in _items(record.get("values")) if _is_number(value)}
            if not math.isfinite(time) or abs(version) >= 1 << 63:
                return False
        except (ValueError, LookupError, TypeError, OverflowError, AttributeError):
            return False
        if not isinstance(process, str):
            return False
        for name, value in values.items():
            column = self._columns.setdefault((process, name), Column())
            column.add(version, time, value)
            if self._newest is not None and len(column.values) >= 2 * self._newest:
                column.keep(self._newest)
        for name, histogram in _items(record.get("histograms")):
            newest = self._histograms.get((process, name))
            read = _histogram(version, histogram)
            if read is not None and (newest is None or version >= newest.version):
                self._histograms[process, name] = read
        return True

    def _forget(self) -> None:
        # A file that is too large becomes the old one, and a new one begins.
        self._files = [AppendedLines(self._folder / name) for name in (OLD, FILE)]
        for lines in self._files:
            lines.rewound()
        self._columns: dict[tuple[str, str], Column] = {}
        self._histograms: dict[tuple[str, str], Distribution] = {}
        self.unreadable = 0  # lines that were not metrics


def read_metrics(folder: Path) -> Metrics:
    """The metrics in a run folder at this moment."""
    metrics = Metrics(folder)
    metrics.update()
    return metrics


def _histogram(version: int, record: Any) -> Distribution | None:
    try:
        edges, counts = np.array(record["edges"], float), np.array(record["counts"], float)
    except (ValueError, LookupError, TypeError, OverflowError):
        return None
    if not (edges.ndim == counts.ndim == 1 and len(edges) == len(counts) + 1):
        return None
    is_whole = (np.abs(edges) < LARGEST).all() and (np.diff(edges) > 0).all() and (counts >= 0).all()
    return Distribution(version, edges, counts) if is_whole and np.isfinite(counts).all() else None


def _items(record: Any) -> Any:
    return record.items() if isinstance(record, dict) else ()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _order(process: str) -> tuple[int, str, int]:
    """Sampler and learner first; generator-2 before generator-10."""
    match = re.fullmatch(r"(.*?)-?(\d{1,18})", process)
    name, number = (match[1], int(match[2])) if match else (process, -1)
    return (FIRST.index(name) if name in FIRST else len(FIRST), name, number)
