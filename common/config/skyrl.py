"""SkyRL's `off_policy_correction` block."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from common.config.section import Section
from common.config.stages import Stage, Weight, ratio_band

# Every stage sees what the ones before it have left, and no single token is clipped before a row is summed.
SKYRL: dict[str, Any] = {"sees": "left", "bound": math.inf}


class SkyRLCorrection(Section):
    """SkyRL's `off_policy_correction`: outlier rows, then single tokens, then truncated weights, then whole rows.

    Every stage sees the mask the stage before it left. The loss keeps its denominator.
    """

    tis_ratio_type: Literal["token", "sequence"] | None = Field(None, description="Level of the truncated weights.")
    token_tis_ratio_clip_high: float = Field(2.0, gt=0, description="Truncation of token weights.")
    sequence_tis_ratio_clip_high: float = Field(5.0, gt=0, description="Truncation of sequence weights.")
    sequence_mask_metric: Literal["product", "geometric"] | None = Field(
        None, description="Drop rows by the product or by the geometric mean of their token ratios."
    )
    geo_mask_low: float = Field(0.99, gt=0, description="Smallest geometric mean kept.")
    geo_mask_high: float = Field(1.01, gt=0, description="Largest geometric mean kept.")
    product_mask_low: float = Field(0.5, gt=0, description="Smallest product kept.")
    product_mask_high: float = Field(2.0, gt=0, description="Largest product kept.")
    outlier_token_is_threshold_low: float | None = Field(
        None, gt=0, description="A row with any token ratio below goes (1e-4 is usual)."
    )
    outlier_token_is_threshold_high: float | None = Field(
        None, gt=0, description="A row with any token ratio above goes (100 is usual)."
    )
    token_mask_is_threshold_low: float | None = Field(
        None, gt=0, description="Tokens with a ratio below go; acts only together with its upper partner."
    )
    token_mask_is_threshold_high: float | None = Field(
        None, gt=0, description="Tokens with a ratio above go; acts only together with its lower partner."
    )

    @model_validator(mode="after")
    def _check(self) -> SkyRLCorrection:
        for name in ("geo_mask", "product_mask", "outlier_token_is_threshold", "token_mask_is_threshold"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if low is not None and high is not None and low > high:
                raise ValueError(f"{name}_low = {low} is above {name}_high = {high}; swap the two")
        return self

    def stages(self) -> list[Stage]:
        """Outlier rows, single tokens, weights, whole rows; each sees what the ones before it have left."""
        stages: list[Stage] = []
        low, high = self.outlier_token_is_threshold_low, self.outlier_token_is_threshold_high
        if low is not None or high is not None:
            stages.append(ratio_band("outlier_seq", "any", low, high, **SKYRL))
        low, high = self.token_mask_is_threshold_low, self.token_mask_is_threshold_high
        if low is not None and high is not None:
            stages.append(ratio_band("token_mask", "token", low, high, **SKYRL))
        if self.tis_ratio_type is not None:
            caps = {"token": self.token_tis_ratio_clip_high, "sequence": self.sequence_tis_ratio_clip_high}
            cap = caps[self.tis_ratio_type]
            stages.append(Weight(self.tis_ratio_type, 1 / cap, cap, sees="left"))
        if self.sequence_mask_metric == "geometric":
            stages.append(ratio_band("geo_sequence_mask", "mean", self.geo_mask_low, self.geo_mask_high, **SKYRL))
        if self.sequence_mask_metric == "product":
            stages.append(
                ratio_band("product_sequence_mask", "sum", self.product_mask_low, self.product_mask_high, **SKYRL)
            )
        return stages
