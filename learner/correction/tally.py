"""Statistics that add up: sums and extremes of micro-batches and ranks, turned into means at the very end.

Nothing here waits for the device until `totals` is called, once an optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from learner.world import World


@dataclass(frozen=True, slots=True)
class Totals:
    """What a tally came to, over all micro-batches and ranks."""

    sums: dict[str, float]
    peaks: dict[str, float]
    tables: dict[str, list[list[float]]]


class Tally:
    """Named sums and maxima. Which names there are depends on the configuration alone, never on the data."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.peaks: dict[str, torch.Tensor] = {}
        self.tables: dict[str, torch.Tensor] = {}
        self._prefix = ""

    @contextmanager
    def under(self, prefix: str) -> Iterator[Tally]:
        """Put the names given inside the block under a prefix."""
        outer, self._prefix = self._prefix, f"{self._prefix}{prefix}"
        try:
            yield self
        finally:
            self._prefix = outer

    def add(self, **values: torch.Tensor) -> None:
        """Sum each tensor into its name."""
        for name, tensor in values.items():
            total, name = tensor.sum(dtype=torch.float64), self._prefix + name
            self.sums[name] = self.sums[name] + total if name in self.sums else total

    def peak(self, **values: torch.Tensor) -> None:
        """Keep the largest value of each tensor; an empty one counts as minus infinity."""
        for name, tensor in values.items():
            top = tensor.amax() if tensor.numel() else tensor.new_tensor(-torch.inf)
            top, name = top.double(), self._prefix + name
            self.peaks[name] = torch.maximum(self.peaks[name], top) if name in self.peaks else top

    def add_table(self, name: str, values: torch.Tensor) -> None:
        """Sum a matrix of sums into its name."""
        self.tables[name] = self.tables[name] + values if name in self.tables else values

    def merge(self, other: Tally) -> None:
        """Take in the statistics of other tokens."""
        for name, total in other.sums.items():
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        for name, table in other.tables.items():
            self.add_table(name, table)
        for name, top in other.peaks.items():
            self.peaks[name] = torch.maximum(self.peaks[name], top) if name in self.peaks else top

    def totals(self, world: World | None = None) -> Totals:
        """Everything over all ranks, as plain numbers; every rank must call this with the same names."""
        sums = [*self.sums.values()]
        parts = [torch.stack(sums)] if sums else []
        parts += [table.reshape(-1) for table in self.tables.values()]
        added = torch.cat(parts).tolist() if parts else []
        tops = torch.stack([*self.peaks.values()]).tolist() if self.peaks else []
        if world is not None:
            added, tops = world.all_reduce_sum(added), world.all_reduce_max(tops)
        tables, start = {}, len(sums)
        for name, table in self.tables.items():
            rows, columns = table.shape
            tables[name] = [added[start + row * columns : start + (row + 1) * columns] for row in range(rows)]
            start += rows * columns
        return Totals(
            dict(zip(self.sums, added[: len(sums)], strict=True)), dict(zip(self.peaks, tops, strict=True)), tables
        )
