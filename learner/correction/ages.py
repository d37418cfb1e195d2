"""How old each token is, in weight versions: the buckets of the reports, and thresholds that depend on them."""

from __future__ import annotations

import torch

from common.config import AGE_BUCKETS, CorrectionConfig
from learner.correction.layout import Layout

# Last age of each bucket but the open one at the end.
LAST_AGES = (0, 1, 2, 4)


def buckets(ages: torch.Tensor) -> torch.Tensor:
    """The bucket of each age, int64 like `ages`: 0, 1, 2, 3-4, 5+ versions; below zero counts as 0."""
    return torch.bucketize(ages, ages.new_tensor(LAST_AGES))


def age_factors(
    ages: torch.Tensor | None, layout: Layout, config: CorrectionConfig
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Factors of `thresholds_by_age` for each token [N] and for each row [B], whose oldest token counts.

    None where there is no schedule, or no age.
    """
    if config.thresholds_by_age is None or ages is None:
        return None, None
    factors = torch.tensor(config.thresholds_by_age, dtype=torch.float64, device=ages.device)
    oldest = layout.segment_max(ages).clamp(min=0)
    return factors[buckets(ages)], factors[buckets(oldest)]


def sum_by_bucket(values: torch.Tensor, bucket: torch.Tensor) -> torch.Tensor:
    """Column sums of values [N, K] in each bucket, [5, K]."""
    return values.new_zeros(len(AGE_BUCKETS), values.shape[1]).index_add(0, bucket, values)
