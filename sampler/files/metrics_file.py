"""`metrics.jsonl` in the run folder: measurements of all processes, one entry per line; only the sampler writes it."""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from common.files import append, rewrite

MAX_PENDING = 4 << 20  # bytes that may wait while the disk is full
NAME = "metrics.jsonl"
MAX_BINS = 128
Span = tuple[int, int]  # position and length in bytes
NOT_WRITTEN = "metrics cannot be written, the run continues"


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram: `counts` [N] of the values between `edges` [N + 1]."""

    edges: list[float]
    counts: list[int]

    @classmethod
    def of_integers(cls, numbers: np.ndarray) -> Self:
        """Count integers [B], B >= 1: each has its own bin; if their range is wide, neighbours share one."""
        low, high = int(numbers.min()), int(numbers.max())
        width = (high - low) // MAX_BINS + 1
        counts = np.bincount((numbers - low) // width)
        return cls([low - 0.5 + width * i for i in range(len(counts) + 1)], counts.tolist())


@dataclass(frozen=True, slots=True)
class Entry:
    """Measurements of a process at a version of the weights.

    Attributes:
        version: the version that the step made, that was evaluated, or that the process has loaded.
        time: Unix seconds.
    """

    version: int
    process: str
    values: dict[str, float]
    histograms: dict[str, Histogram] = field(default_factory=dict)
    time: float = field(default_factory=time.time)

    def line(self) -> bytes:
        """The entry as a line of the file, without NaN and infinity, which JSON cannot represent."""
        values = {name: rounded(value) for name, value in self.values.items() if math.isfinite(value)}
        fields: dict[str, Any] = {
            "time": round(self.time, 3), "version": self.version, "process": self.process, "values": values,
        }  # fmt: skip
        if self.histograms:
            fields["histograms"] = {name: asdict(histogram) for name, histogram in self.histograms.items()}
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Self | None:
        """The entry of a line; None if the line is not an entry."""
        try:
            fields = json.loads(line)
            histograms = {name: Histogram(h["edges"], h["counts"]) for name, h in fields.get("histograms", {}).items()}
            return cls(int(fields["version"]), str(fields["process"]), fields["values"], histograms, fields["time"])
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            return None


class MetricsFile:
    """Appends the entries of a round before the round is committed.

    A file that is too large is renamed to `metrics.old.jsonl`, replacing the previous one, and a new one begins. After
    a kill before the commit, the next sampler writes the same entries again; for each process, version and name the
    last value counts.
    While the disk is full the run continues, and entries wait in memory; if too many wait, the oldest are lost.

    Args:
        folder: of the run; it exists.
        max_bytes: total size of both files.
    """

    def __init__(self, folder: Path, log: Any, max_bytes: int = 256 << 20) -> None:
        self.path = folder / NAME
        self._max_bytes = max_bytes
        self._log = log
        self._pending: list[bytes] = []
        self._not_written: set[int] = set()  # versions with entries that wait
        self._cut_last_line()

    def append(self, entries: Sequence[Entry]) -> bool:
        """Write entries as a whole or not at all; returns whether the file was then renamed to `metrics.old.jsonl`."""
        self._pending += [entry.line() for entry in entries]
        if not self._pending:
            return False
        data = b"".join(self._pending)
        try:
            append(self.path, data)
            is_full = self.path.stat().st_size > self._max_bytes // 2
            if is_full:
                os.replace(self.path, self.path.with_suffix(".old.jsonl"))
        except OSError as error:
            self._warn({entry.version for entry in entries}, error)
            while len(data) > MAX_PENDING and len(self._pending) > 1:
                data = data[len(self._pending.pop(0)) :]
            return False
        if self._not_written:
            self._log.info("metrics are written again", file=str(self.path))
        self._not_written.clear()
        self._pending.clear()
        return is_full

    def _warn(self, versions: set[int], error: OSError) -> None:
        """Name each version once: if this process is killed now, its metrics are lost, which the audit must know."""
        if new := versions - self._not_written:
            named = ",".join(map(str, sorted(new)))
            self._log.warning(NOT_WRITTEN, versions=named, file=str(self.path), error=str(error))
        self._not_written |= versions

    def discard(self, version: int) -> list[Span]:
        """Remove entries of later versions, which will be written again; at version 0, where a run begins, remove all.

        Returns:
            Where the removed lines were in the newer file, by which positions in it have moved.
        """
        self._pending.clear()
        removed: list[Span] = []
        for path in (self.path.with_suffix(".old.jsonl"), self.path):
            removed = []
            try:
                with path.open("rb") as old:
                    rewrite(path, _kept(old, version, removed))
            except FileNotFoundError:
                continue
            except OSError as error:
                self._log.warning("metrics of later versions could not be removed", file=str(path), error=str(error))
                removed = []
        return removed

    def _cut_last_line(self) -> None:
        """Remove a last line that a kill cut short."""
        try:
            with self.path.open("rb+") as file:
                if file.seek(0, os.SEEK_END):  # an empty file cannot be mapped
                    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                        end = data.rfind(b"\n") + 1
                    file.truncate(end)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._log.warning("metrics cannot be read", file=str(self.path), error=str(error))


def _kept(lines: Iterable[bytes], version: int, removed: list[Span]) -> Iterator[bytes]:
    """The lines of entries up to a version; notes where the others are."""
    start = 0
    for line in lines:
        entry = Entry.parse(line) if version > 0 else None
        if entry is not None and entry.version <= version:
            yield line
        else:
            removed.append((start, len(line)))
        start += len(line)


def rounded(value: float) -> float | int:
    """Round to eight significant digits, more than any measurement has; whole numbers become int."""
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.8g}")


def not_written(log: str) -> set[int]:
    """Versions whose metrics may be lost because the disk was full, according to the sampler's log."""
    named = (re.search(r"versions\W+([\d,]+)", line) for line in log.splitlines() if NOT_WRITTEN in line)
    return {int(version) for match in named if match for version in match[1].split(",")}
