"""Model tokens of several rows as one flat list [N]: the layout that losses and corrections compute in.

Padded rows [B, T] and packed sequences both reduce to it, so neither padding nor packing can change a result,
and values in masked places are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Layout:
    """Which row each token belongs to.

    Attributes:
        segment_ids: row of each token, int64 [N].
        lengths: tokens of each row, int64 [B].
        cells: number of elements of the padded matrix that the tokens came from; N if there was none.
        shares: share of each row in its sample (with `prompt-mean`, in its prompt's samples), float64 [B]; the shares
            of a complete sample (or prompt) add up to 1.
        samples: the sum of the shares.
    """

    segment_ids: torch.Tensor
    lengths: torch.Tensor
    cells: int
    shares: torch.Tensor
    samples: float

    @classmethod
    def of_lengths(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu", shares: Sequence[float] | None = None
    ) -> Layout:
        """The layout of consecutive rows of these lengths in tokens; without `shares`, each is a sample."""
        sizes = torch.tensor(lengths, dtype=torch.int64)
        segment_ids = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
        shares = [1.0] * len(lengths) if shares is None else shares
        return cls(
            segment_ids.to(device),
            sizes.to(device),
            len(segment_ids),
            torch.tensor(shares, dtype=torch.float64).to(device),
            sum(shares, 0.0),
        )

    @classmethod
    def of_mask(cls, mask: torch.Tensor, together: int = 1) -> tuple[Layout, torch.Tensor]:
        """The layout of a mask [B, T], and the index of each token in the flattened matrix, int64 [N].

        Args:
            together: number of consecutive rows that share one sample or prompt.
        """
        places = mask.reshape(-1).nonzero().squeeze(1)
        lengths = mask.sum(1)
        rows, columns = mask.shape
        shares = torch.ones(rows, dtype=torch.float64, device=mask.device)
        if together > 1:
            units = torch.arange(rows, device=mask.device) // together
            shares = lengths / lengths.new_zeros(rows).index_add(0, units, lengths)[units].clamp(min=1).double()
        return cls(places // max(columns, 1), lengths, mask.numel(), shares, float(-(-rows // together))), places

    @property
    def count(self) -> int:
        """Number of rows B; some may be empty."""
        return len(self.lengths)

    @cached_property
    def has_tokens(self) -> torch.Tensor:
        """Rows with any token, bool [B]."""
        return self.lengths > 0

    @cached_property
    def divisors(self) -> torch.Tensor:
        """Tokens of each row, at least 1 [B]."""
        return self.lengths.clamp(min=1)

    def segment_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over each row's tokens [B] of values [N]."""
        return values.new_zeros(self.count).index_add(0, self.segment_ids, values)

    def segment_max(self, values: torch.Tensor) -> torch.Tensor:
        """Largest value of each row [B] of values [N]; for an empty row, the smallest number of the type."""
        bottom = torch.finfo(values.dtype).min if values.is_floating_point() else torch.iinfo(values.dtype).min
        return values.new_full((self.count,), bottom).scatter_reduce(0, self.segment_ids, values, "amax")

    def segment_any(self, values: torch.Tensor) -> torch.Tensor:
        """Rows with any token for which `values` [N] holds, bool [B]."""
        return self.segment_sum(values.long()) > 0

    def segment_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over each row's tokens [B] of values [N]; 0 for an empty row."""
        return self.segment_sum(values) / self.divisors

    def mean_where(self, values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Mean of values [N] over those tokens of each row [B] for which `where`, bool [N], holds; 0 without any."""
        total = self.segment_sum(torch.where(where, values, 0.0))
        return total / self.segment_sum(where.to(values.dtype)).clamp(min=1)

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """Row values [B] to the rows' tokens [N]."""
        return values.index_select(0, self.segment_ids)


def padded(values: torch.Tensor, places: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Token values [N] back in their matrix [B, T], zero elsewhere."""
    return values.new_zeros(shape.numel()).index_copy(0, places, values).view(shape)
