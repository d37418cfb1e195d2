"""M2PO's mask (arXiv 2510.01161): the tokens on which the policies differ most are dropped."""

from __future__ import annotations

import torch

from learner.batch.layout import Layout
from learner.correction.ranking import largest, token_keys


def columns(old: torch.Tensor, rollout: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The table that the mask is computed from, float64 [N, 3]: x^2, the key for ties, whether x is finite."""
    x = old.double() - rollout.double()
    finite = x.isfinite()
    keys = token_keys(torch.where(finite, rollout, 0.0), layout)
    return torch.stack([torch.where(finite, x, 0.0).square(), keys, finite.double()], dim=1)


def second_moment_mask(threshold: float, table: torch.Tensor) -> torch.Tensor:
    """The tokens that are kept, bool [M], from the `columns` of all tokens of a mini-batch [M, 3]."""
    kept = table[:, 2].bool()
    places = kept.nonzero()[:, 0]
    if not len(places):
        return kept
    squares, keys, _ = table[places].unbind(1)
    order = largest(squares, keys, len(places))
    # means[i] is the mean of x^2 without its i largest values: drop the fewest that bring it below the threshold.
    counts = torch.arange(len(order), 0, -1, dtype=squares.dtype, device=squares.device)
    means = squares[order].flip(0).cumsum(0).flip(0) / counts
    below = (means < threshold).nonzero()
    dropped = int(below[0]) if len(below) else len(order) - 1
    kept[places[order[:dropped]]] = False
    return kept
