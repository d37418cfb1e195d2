"""How token values become one number, with denominators that count all ranks and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from learner.correction.layout import Layout


@dataclass(frozen=True, slots=True)
class Denominators:
    """What a loss is divided by: counts over all ranks and micro-batches of one optimizer step.

    With them, losses and metrics of micro-batches and ranks simply add up.

    Attributes:
        tokens: unmasked tokens.
        rows: rows with at least one of them.
        horizon: the constant length of `seq-mean-token-sum-norm`.
    """

    tokens: float
    rows: float
    horizon: float

    @classmethod
    def of(cls, mask: torch.Tensor) -> Denominators:
        """Those of one batch [B, T] that is all there is; the horizon is its T."""
        return cls(float(mask.sum()), float(mask.bool().any(-1).sum()), float(mask.shape[-1]))

    def rescale(self, tokens: float, rows: float, mode: str) -> float:
        """What turns a value divided by these counts into one divided by those."""
        return self.tokens / tokens if mode == "token-mean" else self.rows / rows


def aggregate(values: torch.Tensor, mask: torch.Tensor, mode: str, denominators: Denominators) -> torch.Tensor:
    """Token values [B, T] as one number; an empty mask gives zero, never NaN.

    Raises:
        ValueError: the mode is unknown.
    """
    layout, places = Layout.of_mask(mask.bool())
    values = values.reshape(-1).index_select(0, places)
    return aggregate_tokens(values, torch.ones_like(places).bool(), layout, mode, denominators, layout.lengths)


def aggregate_tokens(
    values: torch.Tensor,
    keep: torch.Tensor,
    layout: Layout,
    mode: str,
    denominators: Denominators,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """Token values [N] as one number.

    Args:
        keep: tokens that count, bool [N]; values of others are never read.
        lengths: tokens each row is divided by in `seq-mean-token-mean`, [B].

    Raises:
        ValueError: the mode is unknown.
    """
    values = torch.where(keep, values, 0.0)
    if mode == "token-mean":
        return values.sum() / max(denominators.tokens, 1.0)
    if mode == "seq-mean-token-sum":
        return values.sum() / max(denominators.rows, 1.0)
    if mode == "seq-mean-token-mean":
        return (layout.segment_sum(values) / lengths.clamp(min=1)).sum() / max(denominators.rows, 1.0)
    if mode == "seq-mean-token-sum-norm":
        return values.sum() / (max(denominators.rows, 1.0) * denominators.horizon)
    raise ValueError(
        f"aggregation {mode!r} is unknown; allowed: token-mean, seq-mean-token-sum, seq-mean-token-mean, "
        "seq-mean-token-sum-norm"
    )
