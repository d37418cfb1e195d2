"""Which rows of a batch share a micro-batch, and which rank has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
    row_tokens: Sequence[Sequence[int]],
    mini_batches: int,
    ranks: int,
    token_budget: int,
    operations: Callable[[int], float] = float,
) -> MicroBatchPlan:
    """Split a batch into mini-batches, and each of those into micro-batches of at most `token_budget` tokens.

    Every rank gets the same number of micro-batches, because all ranks must call the same collectives. A row
    longer than the budget is a micro-batch of its own. Samples keep their batch's order between mini-batches; the rows
    of a sample are in one mini-batch, anywhere in it.

    Args:
        row_tokens: tokens of each row of each sample [B].
        operations: of a row with this many tokens, which the ranks of a micro-batch share evenly; by default its
            tokens.
    """
    per_mini = -(-len(row_tokens) // mini_batches) if row_tokens else 0
    rows = []
    for mini in range(mini_batches):
        samples = range(mini * per_mini, min((mini + 1) * per_mini, len(row_tokens)))
        lengths = {(sample, row): tokens for sample in samples for row, tokens in enumerate(row_tokens[sample])}
        bins = _pack(lengths, ranks, token_budget, operations)
        rows.append([bins[start : start + ranks] for start in range(0, len(bins), ranks)])
    return MicroBatchPlan(rows)


@dataclass(slots=True)
class _Bin:
    """The rows of one micro-batch on one rank."""

    operations: float = 0.0
    tokens: int = 0
    rows: list[RowId] = field(default_factory=list)


def _pack(
    lengths: Mapping[RowId, int], ranks: int, budget: int, operations: Callable[[int], float]
) -> list[list[RowId]]:
    """A multiple of `ranks` bins, fullest first, so that the ranks of one micro-batch have similar amounts of work."""
    descending = sorted(lengths, key=lambda place: (-lengths[place], place))
    # Begin with the fewest micro-batches that could hold all tokens; a row above the budget fills one alone.
    rounds = max(1, -(-sum(min(tokens, budget) for tokens in lengths.values()) // (budget * ranks)))
    while True:
        bins = [_Bin() for _ in range(rounds * ranks)]
        if all(_place(row, lengths[row], bins, budget, operations) for row in descending):
            fullest_first = sorted(bins, key=lambda one: (-one.operations, sorted(one.rows)))
            return [sorted(one.rows) for one in fullest_first]
        rounds += 1


def _place(row: RowId, tokens: int, bins: list[_Bin], budget: int, operations: Callable[[int], float]) -> bool:
    """Put a row into the bin with the least work that has room for it; returns whether one has."""
    with_room = [one for one in bins if not one.rows or one.tokens + tokens <= budget]
    if not with_room:
        return False
    least = min(with_room, key=lambda one: (one.operations, len(one.rows)))
    least.operations += operations(tokens)
    least.tokens += tokens
    least.rows.append(row)
    return True
