"""The off-policy correction's settings, by the names of verl and of SkyRL.

Both are compiled to a list of stages (`common/config/stages.py`). Imports no torch: the sampler and the command line
read and explain corrections too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from common.config.former_names import OF_ALGORITHM, translate
from common.config.presets import PRESETS, find_preset, read_arguments
from common.config.section import Section
from common.config.stages import Mask, SecondMoment, Stage, Weight, ratio_band

AGE_BUCKETS = ("age_0", "age_1", "age_2", "age_3_4", "age_5_plus")
REJECTION_MODES = (
    *(f"token_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_{level}_{k}" for level in ("sum", "mean") for k in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
)
# `true` is refused in them, because pydantic would read it as 1.0.
THRESHOLDS = ("rollout_is_threshold", "rollout_rs_threshold", "rollout_token_veto_threshold", "m2_threshold")
# Each stage sees only the tokens that earlier stages kept, and log-ratios are not clamped before a row's are summed.
SKYRL: dict[str, Any] = {"sees": "left", "bound": math.inf}


class SkyRLCorrection(Section):
    """SkyRL's `off_policy_correction`: masks of outlier rows and of tokens, then weights, then masks of whole rows.

    Each stage sees only the tokens that earlier stages kept. The loss keeps its denominator.
    """

    # docs/correction.md describes them.
    tis_ratio_type: Literal["token", "sequence"] | None = None
    token_tis_ratio_clip_high: float = Field(2.0, gt=0)
    sequence_tis_ratio_clip_high: float = Field(5.0, gt=0)
    sequence_mask_metric: Literal["product", "geometric"] | None = None
    geo_mask_low: float = Field(0.99, ge=0)
    geo_mask_high: float = Field(1.01, gt=0)
    product_mask_low: float = Field(0.5, ge=0)
    product_mask_high: float = Field(2.0, gt=0)
    outlier_token_is_threshold_low: float | None = Field(None, ge=0)
    outlier_token_is_threshold_high: float | None = Field(None, gt=0)
    token_mask_is_threshold_low: float | None = Field(None, ge=0)
    token_mask_is_threshold_high: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> SkyRLCorrection:
        for name in ("geo_mask", "product_mask", "outlier_token_is_threshold", "token_mask_is_threshold"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if low is not None and high is not None and low > high:
                raise ValueError(f"{name}_low = {low} is above {name}_high = {high}; swap the two")
        return self

    def bounds(self) -> dict[str, float | None]:
        """The bounds of the stages that mask, by field."""
        names = ["outlier_token_is_threshold_low", "outlier_token_is_threshold_high"]
        if self.token_mask_is_threshold_low is not None and self.token_mask_is_threshold_high is not None:
            names += ["token_mask_is_threshold_low", "token_mask_is_threshold_high"]
        if self.sequence_mask_metric is not None:
            prefix = {"geometric": "geo_mask", "product": "product_mask"}[self.sequence_mask_metric]
            names += [f"{prefix}_low", f"{prefix}_high"]
        return {name: getattr(self, name) for name in names}

    def stages(self) -> list[Stage]:
        """The stages in order: outlier rows, single tokens, weights, whole rows."""
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


class CorrectionConfig(Section):
    """Off-policy correction of the gap between the generating and the proximal policy.

    A preset, verl's fields, or SkyRL's block; fields given beside a preset win. The defaults below are those of verl's
    class; in a configuration that gives any of verl's fields, `rollout_is` is null unless given, as in verl's YAML. A
    section that chooses none of these adjusts the recommended preset, `decoupled_k3_rs_seq_tis`. `spo correction
    list` shows the presets, docs/correction.md explains the fields.
    """

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True, validate_by_alias=True)

    preset_name: str | None = Field(
        None, alias="preset", description="Name of a preset (`spo correction list`); fields given beside it win."
    )
    rollout_is: Literal["token", "sequence"] | None = Field(
        "sequence",
        description="Level of the truncated importance weights pi_old / pi_rollout; null: none. If another of verl's "
        "fields is given, the default is null.",
    )
    rollout_is_threshold: float | str = Field(
        2.0,
        description='Weights are truncated at this value C. A band `"0.5_5.0"` sets weights outside it to 0 instead '
        "(IcePop); the loss keeps its denominator.",
    )
    rollout_is_batch_normalize: bool = Field(
        False, description="Divide the weights by their mean over the batch's tokens (or rows), on all ranks."
    )
    rollout_rs: str | None = Field(
        None, description=f"Rejection: one or more of {', '.join(REJECTION_MODES)}, separated by commas; all must hold."
    )
    rollout_rs_threshold: float | str | None = Field(
        None,
        description='Bounds of `rollout_rs`: one for all, or one for each. For k1 a band of ratios `"0.5_2.0"`, or its '
        "upper end; for k2 and k3 an upper bound.",
    )
    rollout_token_veto_threshold: float | None = Field(
        None, gt=0, description="A row with any token ratio below this is dropped (1e-4 is usual); null: no veto."
    )
    m2_threshold: float | None = Field(
        None,
        gt=0,
        description="The tokens of the mini-batch with the largest (log pi_old - log pi_rollout)^2 are dropped until "
        "the mean of the others is below this (M2PO; 0.04 is usual); null: none.",
    )
    thresholds_by_age: list[float] | None = Field(
        None,
        min_length=len(AGE_BUCKETS),
        max_length=len(AGE_BUCKETS),
        description="Five factors, for tokens of age 0, 1, 2, 3-4 and 5+ versions (rows: of their oldest token): C "
        "becomes C^factor, bounds of rejection are multiplied (of k1 in log space). Below 1 is stricter.",
    )
    verl_compatible_k1: bool = Field(
        False,
        description="Compare k1 = -x with the logs of the band, as verl's code does: the band then holds 1/ratio.",
    )
    compatible_metrics: bool | Literal["2026-01", "2026-08"] = Field(
        False,
        description="Compute metrics as verl and SkyRL do, which count empty rows and padding. `2026-08`: verl's "
        "figures of weights describe the applied weights (since its #5722 of 2026-03-24); `2026-01`, also `true`: they "
        "describe the ratio before truncation.",
    )
    skyrl: SkyRLCorrection | None = Field(
        None,
        description="SkyRL's `off_policy_correction` block, instead of `rollout_is` and `rollout_rs` "
        "(docs/correction.md has its fields).",
    )

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> CorrectionConfig:
        """The correction of this name, with single fields replaced.

        Args:
            overrides: fields, or arguments of verl's function of this name: `threshold`, `rs_threshold` and others.

        Raises:
            ValueError: no such preset, or a wrong field.
        """
        return cls(**{"preset": name, **read_arguments(find_preset(name), overrides)})

    @classmethod
    def presets(cls) -> dict[str, CorrectionConfig]:
        return {name: cls.preset(name) for name in PRESETS}

    @classmethod
    def read_former(cls, data: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
        fields, notes = translate(data)
        return {name: value for name, value in fields.items() if name not in OF_ALGORITHM}, notes

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        """Add the preset's fields where none are given; SkyRL's block switches verl's default weights off."""
        if not isinstance(data, dict):
            return data
        name = data.get("preset", data.get("preset_name"))
        if isinstance(name, str):
            preset = find_preset(name)
            data = {**preset.fields, **data, "preset": preset.name}
        if data.get("skyrl") is not None:
            data = {"rollout_is": None, **data}
        for field in THRESHOLDS:
            if isinstance(data.get(field), bool):
                raise ValueError(f"{field} = {str(data[field]).lower()} is not a number; give the threshold itself")
        return data

    @model_validator(mode="after")
    def _check(self) -> CorrectionConfig:
        self.stages()
        if self.thresholds_by_age and not all(0 < factor < math.inf for factor in self.thresholds_by_age):
            raise ValueError(f"thresholds_by_age = {self.thresholds_by_age} must all be numbers above 0")
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            raise ValueError(
                "rollout_is_batch_normalize = true has no weights to normalise while rollout_is is null; set "
                "rollout_is to token or sequence, or rollout_is_batch_normalize=false"
            )
        own = (self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold, self.m2_threshold)
        if self.skyrl and any(own):
            raise ValueError(
                "skyrl is one spelling and rollout_is, rollout_rs, rollout_token_veto_threshold and m2_threshold are "
                "the other; give one of the two"
            )
        return self

    @property
    def reports_applied(self) -> bool:
        """True if the metrics of weights describe the applied weights, as verl's do since its #5722."""
        return self.compatible_metrics == "2026-08"

    @property
    def renormalizes(self) -> bool:
        """True if the loss is divided by the counts after rejection; SkyRL divides by those before."""
        return self.skyrl is None

    @property
    def weight(self) -> Weight | None:
        return next((stage for stage in self.stages() if isinstance(stage, Weight)), None)

    @property
    def masks(self) -> list[Mask]:
        return [stage for stage in self.stages() if isinstance(stage, Mask)]

    def stages(self) -> list[Stage]:
        """The stages of the correction, in order.

        Raises:
            ValueError: a mode or a threshold is wrong; the text names it and what is allowed.
        """
        if self.skyrl is not None:
            return self.skyrl.stages()
        stages: list[Stage] = []
        if self.rollout_is is not None:
            lower, upper = parse_band(
                str(self.rollout_is_threshold), f"rollout_is_threshold = {self.rollout_is_threshold!r}", math.inf
            )
            if lower is None:
                stages.append(Weight(self.rollout_is, 1 / upper, upper))
            else:
                stages.append(Weight(self.rollout_is, lower, upper, zero_outside=True))
        if self.rollout_token_veto_threshold is not None:
            stages.append(ratio_band("veto", "any", self.rollout_token_veto_threshold, None, by_age=False))
        if self.m2_threshold is not None:
            stages.append(SecondMoment(self.m2_threshold))
        return [*stages, *self.rejection()]

    def rejection(self) -> list[Mask]:
        """The stages of `rollout_rs` and its thresholds, without the veto; raises what `stages` does."""
        if self.rollout_rs is None:
            if self.rollout_rs_threshold is not None:
                raise ValueError(
                    f"rollout_rs_threshold = {self.rollout_rs_threshold!r} bounds nothing while rollout_rs is null; "
                    "set rollout_rs, or rollout_rs_threshold=null"
                )
            return []
        modes = _parts(self.rollout_rs)
        if not modes:
            raise ValueError(f"rollout_rs = {self.rollout_rs!r} names no mode; allowed: {', '.join(REJECTION_MODES)}")
        for mode in modes:
            if mode not in REJECTION_MODES:
                raise ValueError(
                    f"rollout_rs = {self.rollout_rs!r}: {mode!r} is not a mode; allowed: {', '.join(REJECTION_MODES)}, "
                    "separated by commas"
                )
        if self.rollout_rs_threshold is None:
            raise ValueError(f"rollout_rs = {self.rollout_rs!r} needs rollout_rs_threshold (given: null)")
        bounds = _parts(str(self.rollout_rs_threshold))
        if not bounds:
            raise ValueError(
                f"rollout_rs_threshold = {self.rollout_rs_threshold!r} is empty; give a number, or lower_upper"
            )
        rules = list(dict.fromkeys(modes))  # as in verl, a mode that is named twice counts once, with one threshold
        if len(bounds) not in (1, len(rules)):
            raise ValueError(
                f"rollout_rs_threshold = {self.rollout_rs_threshold!r} has {len(bounds)} parts for {len(rules)} "
                f"mode{'s' * (len(rules) > 1)} ({', '.join(rules)}); give one for all, or one for each"
            )
        bounds *= len(rules) // len(bounds)
        masks = {rule: self._mask(rule, bound) for rule, bound in zip(rules, bounds, strict=True)}
        return [masks[mode] for mode in modes]

    def _mask(self, mode: str, bound: str) -> Mask:
        words: list[Any] = mode.split("_")
        level, estimator = words[-2:]
        field = f"rollout_rs_threshold = {self.rollout_rs_threshold!r}"
        if estimator != "k1" and "_" in bound:
            raise ValueError(f"{field}: {mode} takes an upper bound alone, not a band (given: {bound!r})")
        lower, upper = parse_band(bound, f"{field} (for {mode})")
        if estimator != "k1":
            return Mask(mode, level, estimator, -math.inf, upper)
        if lower is None:
            lower = 1 / upper
            if lower > upper:
                raise ValueError(f"{field}: lower {lower:g} is above upper {upper:g}")
        if self.verl_compatible_k1:
            return Mask(mode, level, "k1", math.log(lower), math.log(upper))
        return ratio_band(mode, level, lower, upper)


def _parts(text: str) -> list[str]:
    # A trailing comma separates nothing.
    return [part for part in (part.strip() for part in text.split(",")) if part]


def parse_band(text: str, field: str, largest: float = sys.float_info.max) -> tuple[float | None, float]:
    """Read `"upper"` or `"lower_upper"`, both above 0 and at most `largest`; None if there is no lower bound.

    Raises:
        ValueError: it is neither; the text names `field`.
    """
    values = []
    for part in text.split("_"):
        try:
            values.append(float(part))
        except ValueError:
            raise ValueError(f"{field}: {part!r} is not a number") from None
        if not 0 < values[-1] <= largest:
            raise ValueError(f"{field}: {part!r} must be a number above 0")
    if len(values) > 2:
        raise ValueError(f"{field}: {text!r} is not lower_upper")
    if len(values) == 2 and values[0] > values[1]:
        raise ValueError(f"{field}: lower {values[0]:g} is above upper {values[1]:g}")
    return (values[0] if len(values) == 2 else None), values[-1]
