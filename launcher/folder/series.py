"""Metrics in memory: a series of numbers, or of histograms, for each process and name."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

MOST_HISTOGRAMS = 512  # kept of a name; beyond, every other one is forgotten


class Series(NamedTuple):
    """One metric of one process.

    Attributes:
        versions: weight version that each value belongs to, int64 [N].
        times: Unix time in seconds at which it was written, float64 [N].
        values: float64 [N]; NaN where nothing could be measured.
    """

    versions: np.ndarray
    times: np.ndarray
    values: np.ndarray


class Histogram(NamedTuple):
    """How often values lay between each two edges, at a weight version: `edges` float64 [N + 1], `counts` [N]."""

    version: int
    time: float
    edges: np.ndarray
    counts: np.ndarray


@dataclass(slots=True)
class Column:
    """All that was written of a metric, in that order: 24 bytes an entry."""

    versions: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, version: int, time: float, value: float) -> None:
        """Append an entry."""
        self.versions.append(version)
        self.times.append(time)
        self.values.append(value)

    def by_version(self) -> Series:
        """The last entry of each version, by version."""
        written = self.in_order()
        versions, from_end = np.unique(written.versions[::-1], return_index=True)
        last = len(written.versions) - 1 - from_end
        return Series(versions, written.times[last], written.values[last])

    def in_order(self) -> Series:
        """Every entry, in the order in which they were written."""
        # Copies: an array that numpy looks into cannot grow.
        return Series(np.array(self.versions, np.int64), np.array(self.times), np.array(self.values))


class Histograms:
    """The last histogram of each version; where there are very many, of some versions."""

    def __init__(self) -> None:
        self._by_version: dict[int, Histogram] = {}

    def add(self, histogram: Histogram) -> None:
        """Keep this one, in place of an earlier one of its version."""
        self._by_version[histogram.version] = histogram
        if len(self._by_version) > MOST_HISTOGRAMS:
            for version in sorted(self._by_version)[1:-1:2]:
                del self._by_version[version]

    def by_version(self) -> list[Histogram]:
        """By version."""
        return [self._by_version[version] for version in sorted(self._by_version)]


EMPTY = Series(np.empty(0, np.int64), np.empty(0), np.empty(0))
