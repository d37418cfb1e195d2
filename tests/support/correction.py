"""Random corrections and batches, and a correction written once more in plain Python, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from common.config import CorrectionConfig, SkyRLCorrection
from common.config.correction import REJECTION_MODES

# Last age of each bucket of `thresholds_by_age` but the last.
LAST_AGES = (0, 1, 2, 4)
# Bands and bounds that identical policies pass.
BANDS = ("0.5_2.0", "0.9_1.1", "0.999_1.001", "3", "1_4", "0.25_1")
BOUNDS = ("0.01", "0.5", "3", "200")
SCHEDULES = ([1.0, 0.8, 0.6, 0.4, 0.2], [1.0, 1.5, 0.5, 2.0, 3.0])


@dataclass(frozen=True)
class Batch:
    """Padded rows [B, T]; what stands in masked places is arbitrary.

    Attributes:
        ages: versions, or None.
    """

    old: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor
    ages: torch.Tensor | None

    def of(self, change: Any) -> Batch:
        """The batch with every tensor changed in the same way."""
        return Batch(*(None if values is None else change(values) for values in vars(self).values()))

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Log-probs and ages of the model tokens [N]."""
        return self.old[self.mask], self.rollout[self.mask], None if self.ages is None else self.ages[self.mask]


@st.composite
def batches(draw: st.DrawFn, *, empty: bool = True, wild: bool = True, near: bool = False) -> Batch:
    """Up to six rows of up to seven places; log ratios from 1e-9 to 1e4; NaN and infinities where masked.

    Args:
        empty: allow batches without any model token.
        wild: NaN, infinities and huge numbers in masked places; otherwise zeros.
        near: log ratios near the usual thresholds, and always with ages.
    """
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    scales = [0.05, 0.4, 3.0] if near else [0.0, 1e-9, 1e-3, 0.05, 0.4, 3.0, 30.0, 1e4]
    scale = draw(st.sampled_from(scales))
    density = draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    with_ages = near or draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = rng.random((rows, width)) < density
    if not empty and not mask.any():
        mask[rng.integers(rows), rng.integers(width)] = True
    # Rows differ in how far they are off, so that rules drop some and keep others.
    x = rng.normal(size=(rows, width)) * scale * rng.choice([0.01, 0.3, 1.0], (rows, 1))
    rollout = -5 * rng.random((rows, width))
    old = rollout if scale == 0 else rollout + x.clip(-1e4, 1e4)
    junk = rng.choice([np.nan, np.inf, -np.inf, 1e300], (2, rows, width)) if wild else np.zeros((2, rows, width))
    ages = torch.from_numpy(rng.choice([-1, 0, 1, 2, 3, 4, 5, 40], (rows, width))) if with_ages else None
    old, rollout = np.where(mask, old, junk[0]), np.where(mask, rollout, junk[1])
    return Batch(torch.from_numpy(old), torch.from_numpy(rollout), torch.from_numpy(mask), ages)


@st.composite
def verl_configs(draw: st.DrawFn, *, around_one: bool = False, scheduled: bool = False) -> CorrectionConfig:
    """verl's fields: all modes, alone and together, vetoes, thresholds by age.

    Args:
        around_one: bands contain the ratio 1, so that identical policies are kept.
        scheduled: always with thresholds by age.
    """
    modes = draw(st.lists(st.sampled_from(REJECTION_MODES), max_size=3, unique=True))
    bands = BANDS if around_one else (*BANDS, "1.5_3", "0.1_0.9")
    bounds = [draw(st.sampled_from(bands if mode.endswith("k1") else BOUNDS)) for mode in modes]
    level = draw(st.sampled_from([None, "token", "sequence"]))
    return CorrectionConfig(
        rollout_is=level,
        rollout_is_threshold=draw(st.sampled_from([1.0, 1.2, 2.0, 8.0])),
        rollout_is_batch_normalize=level is not None and draw(st.booleans()),
        rollout_rs=", ".join(modes) or None,
        rollout_rs_threshold=",".join(bounds) or None,
        rollout_token_veto_threshold=draw(st.sampled_from([None, None, 1e-4, 0.3, 0.9])),
        thresholds_by_age=draw(st.sampled_from(SCHEDULES if scheduled else [None, None, *SCHEDULES])),
        verl_compatible_k1=draw(st.booleans()),
    )


@st.composite
def skyrl_configs(draw: st.DrawFn, *, scheduled: bool = False) -> CorrectionConfig:
    """SkyRL's block: all stages, alone and together; bands contain the ratio 1."""
    low, high = st.sampled_from([None, 1e-4, 0.5, 0.95]), st.sampled_from([None, 1.05, 2.0, 100.0])
    sides = {}
    for name in ("outlier_token_is_threshold", "token_mask_is_threshold"):
        sides |= {f"{name}_low": draw(low), f"{name}_high": draw(high)}
    block = SkyRLCorrection(
        tis_ratio_type=draw(st.sampled_from([None, "token", "sequence"])),
        token_tis_ratio_clip_high=draw(st.sampled_from([1.0, 2.0])),
        sequence_tis_ratio_clip_high=draw(st.sampled_from([1.5, 5.0])),
        sequence_mask_metric=draw(st.sampled_from([None, "product", "geometric"])),
        geo_mask_low=draw(st.sampled_from([0.5, 0.8, 0.95, 0.99])),
        geo_mask_high=draw(st.sampled_from([1.01, 1.05, 1.25, 2.0])),
        **sides,
    )
    ages = draw(st.sampled_from(SCHEDULES if scheduled else [None, None, *SCHEDULES]))
    return CorrectionConfig(skyrl=block, thresholds_by_age=ages)


def configs(*, around_one: bool = False, scheduled: bool = False) -> st.SearchStrategy[CorrectionConfig]:
    """Both spellings."""
    return st.one_of(verl_configs(around_one=around_one, scheduled=scheduled), skyrl_configs(scheduled=scheduled))


# The plain correction: one Python list of log ratios a row, no tensors.


def exp_bounded(x: float) -> float:
    return math.exp(max(-20.0, min(20.0, x)))


def estimator(kind: str, x: float) -> float:
    x = max(-20.0, min(20.0, x))
    return {"k1": -x, "k2": x * x / 2, "k3": math.expm1(x) - x}[kind]


def factor_of(config: CorrectionConfig, age: int | None) -> float:
    if config.thresholds_by_age is None or age is None:
        return 1.0
    return config.thresholds_by_age[sum(age > last for last in LAST_AGES)]


def band_of(text: str, inverted: bool) -> tuple[float, float]:
    """A band of ratios as (lowest, highest) x; inverted: verl's code bounds the inverse ratio."""
    parts = [float(part) for part in text.split("_")]
    low, high = parts if len(parts) == 2 else (1 / parts[0], parts[0])
    return (-math.log(high), -math.log(low)) if inverted else (math.log(low), math.log(high))


def plain_correction(batch: Batch, config: CorrectionConfig) -> tuple[list[list[float]] | None, list[list[bool]]]:
    """Weights and mask [B, T] as nested lists, zero where masked; of verl's spelling without normalisation."""
    weights, kept = [], []
    for row in range(batch.mask.shape[0]):
        places = [place for place in range(batch.mask.shape[1]) if batch.mask[row, place]]
        x = [float(batch.old[row, place] - batch.rollout[row, place]) for place in places]
        ages = [None if batch.ages is None else int(batch.ages[row, place]) for place in places]
        known = [age for age in ages if age is not None]
        factors = [factor_of(config, age) for age in ages]
        oldest = factor_of(config, max(known)) if known else 1.0
        found = _plain_skyrl if config.skyrl else _plain_verl
        row_weights, row_kept = found(x, factors, oldest, config) if x else ([], [])
        weights.append([0.0] * batch.mask.shape[1])
        kept.append([False] * batch.mask.shape[1])
        for place, weight, keep in zip(places, row_weights or [0.0] * len(places), row_kept, strict=True):
            weights[-1][place], kept[-1][place] = weight, keep
    weighs = config.skyrl.tis_ratio_type if config.skyrl else config.rollout_is
    return weights if weighs else None, kept


def _plain_verl(
    x: list[float], factors: list[float], oldest: float, config: CorrectionConfig
) -> tuple[list[float], list[bool]]:
    limit, weights = config.rollout_is_threshold, []
    if config.rollout_is == "token":
        weights = [min(exp_bounded(value), limit**factor) for value, factor in zip(x, factors, strict=True)]
    elif config.rollout_is == "sequence":
        weights = [min(exp_bounded(sum(x)), limit**oldest)] * len(x)
    kept = [True] * len(x)
    veto = config.rollout_token_veto_threshold
    if veto is not None and any(value < math.log(veto) for value in x):
        kept = [False] * len(x)
    modes = [mode.strip() for mode in (config.rollout_rs or "").split(",") if mode.strip()]
    bounds = str(config.rollout_rs_threshold).split(",")
    for mode, bound in zip(modes, bounds * len(modes) if len(bounds) == 1 else bounds, strict=False):
        *_, level, kind = mode.split("_")
        values = [estimator(kind, value) for value in x]
        whole = {"token": 0.0, "sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[level]
        for place, value in enumerate(values):
            factor = factors[place] if level == "token" else oldest
            value = value if level == "token" else whole
            if kind == "k1":
                lowest, highest = band_of(bound, config.verl_compatible_k1)
                kept[place] &= lowest * factor <= -value <= highest * factor
            else:
                kept[place] &= value <= float(bound) * factor
    return weights, kept


def _plain_skyrl(
    x: list[float], factors: list[float], oldest: float, config: CorrectionConfig
) -> tuple[list[float], list[bool]]:
    block = config.skyrl
    assert block is not None

    def inside(value: float, low: float | None, high: float | None, factor: float) -> bool:
        above = low is None or value >= math.log(low) * factor
        return above and (high is None or value <= math.log(high) * factor)

    kept = [True] * len(x)
    low, high = block.outlier_token_is_threshold_low, block.outlier_token_is_threshold_high
    # A token that was dropped before would not count; nothing comes before this stage.
    if not all(inside(value, low, high, factor) for value, factor in zip(x, factors, strict=True)):
        kept = [False] * len(x)
    low, high = block.token_mask_is_threshold_low, block.token_mask_is_threshold_high
    if low is not None and high is not None:
        bounded = [max(-20.0, min(20.0, value)) for value in x]
        kept = [keep and inside(v, low, high, f) for keep, v, f in zip(kept, bounded, factors, strict=True)]
    left = [value for value, keep in zip(x, kept, strict=True) if keep]
    weights = []
    if block.tis_ratio_type == "token":
        limit = block.token_tis_ratio_clip_high
        weights = [min(exp_bounded(value), limit**factor) for value, factor in zip(x, factors, strict=True)]
    elif block.tis_ratio_type == "sequence":
        weights = [min(exp_bounded(sum(left)), block.sequence_tis_ratio_clip_high**oldest)] * len(x)
    bounded = [max(-20.0, min(20.0, value)) for value in left]
    stays = True
    if block.sequence_mask_metric == "product":
        stays = inside(sum(bounded), block.product_mask_low, block.product_mask_high, oldest)
    elif block.sequence_mask_metric == "geometric":
        stays = inside(sum(bounded) / max(len(left), 1), block.geo_mask_low, block.geo_mask_high, oldest)
    return weights, [keep and stays for keep in kept]


def row_order(batch: Batch, order: list[int]) -> Batch:
    return batch.of(lambda values: values[order])


def widened(batch: Batch, left: int, right: int, rows: int) -> Batch:
    """With columns and rows added that are masked; full of NaN where the type has it."""

    def pad(values: torch.Tensor) -> torch.Tensor:
        filler = 0 if not values.is_floating_point() else torch.nan
        return torch.nn.functional.pad(values, (left, right, 0, rows), value=filler)

    padded = batch.of(pad)
    return replace(padded, mask=padded.mask.bool())
