"""Packing: which samples share a micro-batch, on which rank. Pure and the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Sample indices of each micro-batch: `samples[mini_batch][micro_batch][rank]` is a list, often empty."""

    samples: list[list[list[list[int]]]]

    def of_rank(self, rank: int) -> list[list[list[int]]]:
        """This rank's share: `[mini_batch][micro_batch]` lists of indices."""
        return [[ranks[rank] for ranks in micro_batches] for micro_batches in self.samples]


def plan_micro_batches(lengths: Sequence[int], mini_batches: int, ranks: int, token_budget: int) -> MicroBatchPlan:
    """Split a batch into mini-batches, and each of those into micro-batches of at most `token_budget` tokens.

    Every rank gets the same number of micro-batches, because their collectives must meet. A sample longer
    than the budget is a micro-batch of its own. Samples keep their batch's order between mini-batches.

    Args:
        lengths: tokens of each sample [B].
    """
    per_mini = -(-len(lengths) // mini_batches) if lengths else 0
    samples = []
    for mini in range(mini_batches):
        indices = list(range(mini * per_mini, min((mini + 1) * per_mini, len(lengths))))
        bins = _pack(indices, lengths, ranks, token_budget)
        samples.append([bins[start : start + ranks] for start in range(0, len(bins), ranks)])
    return MicroBatchPlan(samples)


def _pack(indices: Sequence[int], lengths: Sequence[int], ranks: int, budget: int) -> list[list[int]]:
    """A multiple of `ranks` bins, fullest first, so that the ranks of one micro-batch have similar amounts of work."""
    descending = sorted(indices, key=lambda index: (-lengths[index], index))
    rounds = max(1, -(-sum(min(lengths[index], budget) for index in indices) // (budget * ranks)))
    while True:
        bins = _fill_evenly(descending, lengths, rounds * ranks)
        if all(len(members) == 1 or tokens <= budget for tokens, members in bins if members):
            fullest_first = sorted(bins, key=lambda item: (-item[0], item[1]))
            return [sorted(members) for _, members in fullest_first]
        rounds += 1


def _fill_evenly(descending: Sequence[int], lengths: Sequence[int], count: int) -> list[tuple[int, list[int]]]:
    """Longest first, each into the emptiest bin: (tokens, indices) of each bin."""
    heap = [(0, number) for number in range(count)]
    heapify(heap)
    bins: list[list[int]] = [[] for _ in range(count)]
    for index in descending:
        tokens, number = heap[0]
        heapreplace(heap, (tokens + lengths[index], number))
        bins[number].append(index)
    return [(tokens, bins[number]) for tokens, number in heap]
