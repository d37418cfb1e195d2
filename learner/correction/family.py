"""One measured quantity, of tokens or of rows, and the statistics that verl reports of such a quantity.

Definitions: mean, max and min of the quantity as it is, over tokens; std of its values clamped to the bounds;
fractions beyond the bounds over tokens, or over rows where the quantity belongs to rows; `seq_*` of row means.
Sums are centred on the value that identical policies give, so that tiny spreads survive the subtraction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from learner.correction.layout import Layout
from learner.correction.tally import Tally


@dataclass(frozen=True, slots=True)
class Family:
    """A quantity's name, its value for identical policies, and whether it belongs to rows."""

    name: str
    target: float
    of_rows: bool

    def count(
        self,
        tally: Tally,
        values: torch.Tensor,
        lower: torch.Tensor | float,
        upper: torch.Tensor | float,
        layout: Layout,
        full: torch.Tensor,
        include_empty: bool = False,
    ) -> None:
        """Add the statistics of some rows.

        Args:
            values: of each token [N], or of each row [B] where the quantity belongs to rows.
            lower, upper: bounds, shaped like `values` or plain numbers.
            full: rows with model tokens, bool [B].
            include_empty: let empty rows take part in statistics of rows, with a row mean of zero.
        """
        tokens = layout.expand(values) if self.of_rows else values
        clamped = values.clamp(min=lower).clamp(max=upper)
        clamped = (layout.expand(clamped) if self.of_rows else clamped) - self.target
        lengths = layout.segment_sum(torch.ones_like(tokens))
        means = layout.segment_sum(tokens) / lengths.clamp(min=1)
        rows = torch.ones_like(full) if include_empty else full
        centred = torch.where(rows, means - self.target, 0.0)
        low, high = _row_bounds(lower, upper, layout, self.of_rows)
        over, under = values > upper, values < lower
        with tally.under(f"{self.name}_"):
            tally.add(sum=tokens - self.target, clamped=clamped, clamped2=clamped.square())
            tally.add(row_sum=centred, row_sum2=centred.square())
            tally.add(row_high=(means > high) & rows, row_low=(means < low) & rows)
            if not self.of_rows:
                tally.add(high=over, low=under)
            else:
                tally.add(high=over & rows, low=under & rows)
            tally.peak(max=tokens, min=-tokens)
            bottom = -torch.inf
            tally.peak(row_max=torch.where(rows, means, bottom), row_min=torch.where(rows, -means, bottom))
            tally.peak(row_dev=torch.where(rows, (means - self.target).abs(), bottom))

    def metrics(
        self, sums: dict[str, float], peaks: dict[str, float], tokens: float, rows: float, two_sided: bool = True
    ) -> dict[str, float]:
        """The statistics by verl's names; {} without tokens."""
        if tokens == 0:
            return {}

        def total(name: str) -> float:
            return sums[f"{self.name}_{name}"]

        def top(name: str) -> float:
            return peaks[f"{self.name}_{name}"]

        share = rows if self.of_rows else tokens
        row_mean = total("row_sum") / rows
        row_spread = max(total("row_sum2") - rows * row_mean**2, 0.0)
        found = {
            "mean": self.target + total("sum") / tokens,
            "max": top("max"),
            "min": -top("min"),
            "std": math.sqrt(max(total("clamped2") / tokens - (total("clamped") / tokens) ** 2, 0.0)),
            "fraction_high": total("high") / share,
            "fraction_low": total("low") / share,
            "seq_mean": self.target + row_mean,
            "seq_std": math.sqrt(row_spread / (rows - 1)) if rows > 1 else 0.0,
            "seq_max": top("row_max"),
            "seq_min": -top("row_min"),
            "seq_max_deviation": top("row_dev"),
            "seq_fraction_high": total("row_high") / rows,
        }
        if two_sided:
            found["seq_fraction_low"] = total("row_low") / rows
        return {f"{self.name}_{name}": value for name, value in found.items()}

    def effective_sample_size(self, sums: dict[str, float], tokens: float) -> float:
        """(E c)^2 / E c^2 of the clamped values c, between 0 and 1."""
        mean = sums[f"{self.name}_clamped"] / tokens
        square = sums[f"{self.name}_clamped2"] / tokens
        return (self.target + mean) ** 2 / (square + 2 * self.target * mean + self.target**2)


def _row_bounds(
    lower: torch.Tensor | float, upper: torch.Tensor | float, layout: Layout, of_rows: bool
) -> tuple[torch.Tensor | float, torch.Tensor | float]:
    """Bounds of row means: the strictest of the row's tokens where these differ."""
    if of_rows:
        return lower, upper
    low = layout.segment_max(lower) if isinstance(lower, torch.Tensor) else lower
    high = -layout.segment_max(-upper) if isinstance(upper, torch.Tensor) else upper
    return low, high
