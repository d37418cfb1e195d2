"""Packing: which samples share a micro-batch, on which rank. Pure and the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace


@dataclass(frozen=True, slots=True)
class Plan:
    """Sample indices by place: `places[mini_batch][micro_batch][rank]` is a list of indices, often empty."""

    places: list[list[list[list[int]]]]

    def of_rank(self, rank: int) -> list[list[list[int]]]:
        """This rank's share: `[mini_batch][micro_batch]` lists of indices."""
        return [[ranks[rank] for ranks in micro_batches] for micro_batches in self.places]


def plan(lengths: Sequence[int], mini_batches: int, ranks: int, token_budget: int) -> Plan:
    """Split a batch into mini-batches, and each of those into micro-batches of at most `token_budget` tokens.

    Every rank gets the same number of micro-batches, because their collectives must meet. A sample longer
    than the budget is a micro-batch of its own. Samples keep their batch's order between mini-batches.

    Args:
        lengths: tokens of each sample [B].
    """
    per_mini = -(-len(lengths) // mini_batches) if lengths else 0
    places = []
    for mini in range(mini_batches):
        indices = list(range(mini * per_mini, min((mini + 1) * per_mini, len(lengths))))
        bins = _pack(indices, lengths, ranks, token_budget)
        places.append([bins[start : start + ranks] for start in range(0, len(bins), ranks)])
    return Plan(places)


def _pack(indices: Sequence[int], lengths: Sequence[int], ranks: int, budget: int) -> list[list[int]]:
    """A multiple of `ranks` bins, fullest first, so that the ranks of one micro-batch have like amounts of work."""
    descending = sorted(indices, key=lambda index: (-lengths[index], index))
    rounds = max(1, -(-sum(min(lengths[index], budget) for index in indices) // (budget * ranks)))
    while True:
        bins = _spread(descending, lengths, rounds * ranks)
        if all(len(held) == 1 or load <= budget for load, held in bins if held):
            ordered = sorted(bins, key=lambda item: (-item[0], item[1]))
            return [sorted(held) for _, held in ordered]
        rounds += 1


def _spread(descending: Sequence[int], lengths: Sequence[int], count: int) -> list[tuple[int, list[int]]]:
    """Longest first, each into the emptiest bin: (load, indices) of each bin."""
    heap = [(0, number) for number in range(count)]
    heapify(heap)
    held: list[list[int]] = [[] for _ in range(count)]
    for index in descending:
        load, number = heap[0]
        heapreplace(heap, (load + lengths[index], number))
        held[number].append(index)
    return [(load, held[number]) for load, number in heap]
