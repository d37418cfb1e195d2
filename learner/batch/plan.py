"""Which rows of a batch share a micro-batch, and which rank has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

# A row: the index of its sample in the batch, and its number in the sample.
RowId = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Rows of each micro-batch: `rows[mini_batch][micro_batch][rank]` is a list, often empty."""

    rows: list[list[list[list[RowId]]]]

    def of_rank(self, rank: int) -> list[list[list[RowId]]]:
        """This rank's share: `[mini_batch][micro_batch]` lists of rows."""
        return [[ranks[rank] for ranks in micro_batches] for micro_batches in self.rows]


def plan_micro_batches(
    row_tokens: Sequence[Sequence[int]], mini_batches: int, ranks: int, token_budget: int
) -> MicroBatchPlan:
    """Split a batch into mini-batches, and each of those into micro-batches of at most `token_budget` tokens.

    Every rank gets the same number of micro-batches, because all ranks must call the same collectives. A row
    longer than the budget is a micro-batch of its own. Samples keep their batch's order between mini-batches; the rows
    of a sample are in one mini-batch, anywhere in it.

    Args:
        row_tokens: tokens of each row of each sample [B].
    """
    per_mini = -(-len(row_tokens) // mini_batches) if row_tokens else 0
    rows = []
    for mini in range(mini_batches):
        samples = range(mini * per_mini, min((mini + 1) * per_mini, len(row_tokens)))
        lengths = {(sample, row): tokens for sample in samples for row, tokens in enumerate(row_tokens[sample])}
        bins = _pack(lengths, ranks, token_budget)
        rows.append([bins[start : start + ranks] for start in range(0, len(bins), ranks)])
    return MicroBatchPlan(rows)


def _pack(lengths: Mapping[RowId, int], ranks: int, budget: int) -> list[list[RowId]]:
    """A multiple of `ranks` bins, fullest first, so that the ranks of one micro-batch have similar amounts of work."""
    descending = sorted(lengths, key=lambda place: (-lengths[place], place))
    # Begin with the fewest micro-batches that could hold all tokens; a row above the budget fills one alone.
    rounds = max(1, -(-sum(min(tokens, budget) for tokens in lengths.values()) // (budget * ranks)))
    while True:
        bins = _fill_evenly(descending, lengths, rounds * ranks)
        if all(len(members) == 1 or tokens <= budget for tokens, members in bins if members):
            fullest_first = sorted(bins, key=lambda item: (-item[0], item[1]))
            return [sorted(members) for _, members in fullest_first]
        rounds += 1


def _fill_evenly(
    descending: Sequence[RowId], lengths: Mapping[RowId, int], count: int
) -> list[tuple[int, list[RowId]]]:
    """Longest first, each into the emptiest bin: (tokens, rows) of each bin."""
    heap = [(0, number) for number in range(count)]
    heapify(heap)
    bins: list[list[RowId]] = [[] for _ in range(count)]
    for place in descending:
        tokens, number = heap[0]
        heapreplace(heap, (tokens + lengths[place], number))
        bins[number].append(place)
    return [(tokens, bins[number]) for tokens, number in heap]
