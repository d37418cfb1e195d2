"""The stages of a correction, each of which weights or masks model tokens.

verl's fields and SkyRL's block are two ways to write such a list; `CorrectionConfig.stages` reads both, and one loop
in `learner/correction/engine.py` runs it. Below, x is log pi_old - log pi_rollout of a model token. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

# A stage sees all model tokens of a row, or only those that earlier stages kept.
Sees = Literal["all", "left"]
# Log-ratios are clamped to this: a larger one says nothing more, and its exp() could overflow.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True)
class Weight:
    """Multiply token losses by min(ratio, upper); with a band, by the ratio inside it and by 0 outside."""

    level: Literal["token", "sequence"]  # the ratio of each token, or the product over the sequence
    lower: float  # of the band; without one it is only reported
    upper: float  # of the band; without one, the truncation C
    zero_outside: bool = False  # whether there is a band
    sees: Sees = "all"  # which tokens enter a product
    by_age: bool = True  # whether `thresholds_by_age` moves the bound

    @property
    def of_rows(self) -> bool:
        return self.level == "sequence"


@dataclass(frozen=True, slots=True)
class Mask:
    """Keep the tokens or rows with lower <= statistic <= upper, bounds in units of the estimator."""

    name: str  # in metrics
    # `token`; the `sum`, the `mean` or the `max` over a row's tokens; `any`: a row is dropped if any of its tokens is
    # out of bounds.
    level: Literal["token", "sum", "mean", "max", "any"]
    estimator: Literal["k1", "k2", "k3"]  # k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x
    lower: float
    upper: float
    sees: Sees = "all"  # which tokens enter the statistic of a row
    bound: float = LOG_RATIO_BOUND  # each token's x is first clamped to +-bound
    by_age: bool = True  # whether `thresholds_by_age` moves the bounds

    @property
    def of_rows(self) -> bool:
        return self.level in ("sum", "mean", "max")


@dataclass(frozen=True, slots=True)
class SecondMoment:
    """Drop the tokens with the largest x^2 of the mini-batch, until the mean of the others is below the threshold.

    M2PO, arXiv 2510.01161. At least one token stays.
    """

    threshold: float
    by_age: bool = False  # `thresholds_by_age` does not move the threshold


Stage = Weight | Mask | SecondMoment


def ratio_band(name: str, level: Any, low: float | None, high: float | None, **others: Any) -> Mask:
    """Keep ratios e^x in [low, high]; None means no bound on that side."""
    lower, upper = -math.log(high) if high else -math.inf, -math.log(low) if low else math.inf
    return Mask(name, level, "k1", lower, upper, **others)
