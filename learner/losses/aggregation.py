"""From token losses to one number, with one denominator over all ranks and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from common.config import AlgorithmConfig
from common.config.algorithm import Aggregation
from learner.batch.layout import Layout


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over all ranks and micro-batches of one optimizer step, by which a loss is divided.

    With them, losses and metrics of micro-batches and ranks simply add up.

    Attributes:
        tokens: unmasked tokens.
        samples: samples (with `prompt-mean`, prompts) with at least one unmasked token; a sample of several rows counts
            with the shares of those rows that have one.
        horizon: the constant length of `seq-mean-token-sum-norm`.
    """

    tokens: float
    samples: float
    horizon: float

    @classmethod
    def of(cls, mask: torch.Tensor, shares: torch.Tensor | None = None) -> Denominators:
        """Count a single batch [B, T], which no other rank or micro-batch adds to; the horizon is its T.

        Args:
            shares: of each row in its sample or prompt [B]; by default each row is one.
        """
        used = mask.bool().any(-1)
        samples = used.sum() if shares is None else shares[used].sum()
        return cls(float(mask.sum()), float(samples), float(mask.shape[-1]))

    def rescale(self, tokens: float, samples: float, mode: str) -> float:
        """The factor that turns a value divided by these counts into one divided by the given ones."""
        if mode == "token-sum":
            return 1.0
        return self.tokens / tokens if mode == "token-mean" else self.samples / samples


def row_lengths(keep: torch.Tensor, layout: Layout, config: AlgorithmConfig) -> torch.Tensor:
    """Divisor of each row [B]: its kept tokens; with `algorithm.correction.skyrl`, which never renormalises, all."""
    return layout.segment_sum(keep.long()) if config.correction.renormalizes else layout.lengths


def aggregate(values: torch.Tensor, mask: torch.Tensor, mode: str, denominators: Denominators) -> torch.Tensor:
    """Token values [B, T] as one number, 0 for an empty mask; raises `ValueError` for an unknown mode."""
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
    """Token values [N] as one number, in which `seq-*` weigh each sample once, whatever its rows.

    Args:
        keep: tokens that count, bool [N]; values of others are never read.
        layout: rows with their shares of a sample; for `prompt-mean`, of a prompt.
        lengths: tokens each row is divided by in `seq-mean-token-mean` and `prompt-mean`, [B].

    Raises:
        ValueError: the mode is unknown.
    """
    values = torch.where(keep, values, 0.0)
    if mode == "token-mean":
        return values.sum() / max(denominators.tokens, 1.0)
    if mode == "token-sum":
        return values.sum()
    if mode == "seq-mean-token-sum":
        return values.sum() / (denominators.samples or 1.0)
    if mode in ("seq-mean-token-mean", "prompt-mean"):
        means = layout.segment_sum(values) / lengths.clamp(min=1)
        return (means * layout.shares.to(means.dtype)).sum() / (denominators.samples or 1.0)
    if mode == "seq-mean-token-sum-norm":
        # A batch of no columns has a horizon of zero.
        return values.sum() / ((denominators.samples or 1.0) * max(denominators.horizon, 1.0))
    raise ValueError(f"aggregation {mode!r} is unknown; allowed: {', '.join(get_args(Aggregation))}")
