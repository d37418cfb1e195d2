"""Compares the tokens of a whole mini-batch, over all ranks, so that the result does not depend on packing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from learner.batch.layout import Layout
from learner.ranks.world import World

# Keys below this are exact as floating-point numbers.
KEYS = 1 << 52
# Odd numbers of a mixing function (the finalizer of MurmurHash3), as int64.
FIRST, SECOND = -49064778989728563, -4265267296055464877


def token_keys(rollout: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A key for each token [N], float64, that decides random draws and ties.

    It is a hash of the row's recorded log-probs and of the token's place in the row. It depends neither on packing and
    ranks nor on a seed, so a batch that is trained on again after a restart has the same draws.

    Args:
        rollout: log pi_rollout of each token, row by row [N].
    """
    bits = rollout.detach().float().view(torch.int32).long()
    starts = layout.lengths.cumsum(0) - layout.lengths
    place = torch.arange(len(bits), device=bits.device) - layout.expand(starts)
    rows = layout.segment_sum(_mixed(bits + FIRST * place))
    return _mixed(layout.expand(rows) + SECOND * place).remainder(KEYS).double()


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    for factor in (FIRST, SECOND):
        numbers = (numbers ^ ((numbers >> 33) & 0x7FFFFFFF)) * factor
    return numbers ^ ((numbers >> 33) & 0x7FFFFFFF)


def largest(values: torch.Tensor, keys: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` largest values [N], largest first; of equal ones those with the smaller key first."""
    order = keys.argsort(stable=True)
    return order[values[order].argsort(descending=True, stable=True)][:count]


def over_all(
    columns: Sequence[torch.Tensor], decide: Callable[[torch.Tensor], torch.Tensor], world: World
) -> list[torch.Tensor]:
    """Decide on the tokens of all micro-batches and ranks together.

    Args:
        columns: numbers of each token of this rank's micro-batches, [N, K] each.
        decide: maps the numbers of all tokens, float64 [M, K], to a verdict on each, bool [M].

    Returns:
        The verdicts on each micro-batch's tokens, bool [N] each.
    """
    own = torch.cat([column.double() for column in columns])
    # Ranks that hold slices of the same sequences have the same tokens; only the first of them sends its own.
    data = world.gather(own.cpu().numpy().tobytes() if world.counts_share else b"")
    width = own.shape[1]
    tables = [torch.frombuffer(bytearray(part), dtype=torch.float64).view(-1, width) for part in data if part]
    everything = torch.cat(tables) if tables else own.cpu()
    verdicts = decide(everything)
    # This rank's tokens follow those of the shares before it; a float64 has 8 bytes.
    before = sum(len(part) for part in data[: world.share * (world.size // world.shares)]) // (8 * width)
    return list(verdicts[before : before + len(own)].to(own.device).split([len(column) for column in columns]))
