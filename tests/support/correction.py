"""Random batches for the correction, and a second implementation of it in plain Python, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from common.config import CorrectionConfig
from common.config.correction import REJECTION_MODES

# The last age in each bucket of `thresholds_by_age`, except the open last one.
LAST_AGES = (0, 1, 2, 4)
BY_AGE = [1.0, 1.5, 0.5, 2.0, 3.0]
COMPATIBLE = (False, True, "2026-08")
BANDS, BOUNDS = ("0.5_2.0", "0.9_1.1", "3", "0.25_1"), ("0.01", "0.5", "3", "200")
STAGES: dict[str, Any] = {
    "outlier_token_is_threshold_low": [None, 1e-4, 0.5],
    "outlier_token_is_threshold_high": [None, 1.05, 100.0],
    "token_mask_is_threshold_low": [None, 1e-4, 0.5, 0.95],
    "token_mask_is_threshold_high": [None, 1.05, 2.0],
    "tis_ratio_type": [None, "token", "sequence"],
    "token_tis_ratio_clip_high": [1.0, 2.0],
    "sequence_tis_ratio_clip_high": [1.5, 5.0],
    "sequence_mask_metric": [None, "product", "geometric"],
    "geo_mask_low": [0.5, 0.8, 0.99],
    "geo_mask_high": [1.01, 1.25, 2.0],
}


@dataclass(frozen=True)
class Batch:
    """Padded rows [B, T]; masked places hold arbitrary values."""

    old: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor
    ages: torch.Tensor

    def of(self, change: Any) -> Batch:
        """Apply a change to every tensor."""
        return Batch(*(change(values) for values in vars(self).values()))


@st.composite
def batches(draw: st.DrawFn, *, empty: bool = True) -> Batch:
    """Up to six rows of up to seven places; log ratios from 0 to 1e4; NaN, infinities and huge numbers where masked.

    Args:
        empty: allow batches without any model token.
    """
    shape = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    scale = draw(st.sampled_from([0.0, 1e-9, 1e-3, 0.05, 0.4, 0.4, 3.0, 3.0, 30.0, 1e4]))
    density = draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = rng.random(shape) < density
    if not empty and not mask.any():
        mask[rng.integers(shape[0]), rng.integers(shape[1])] = True
    # Rows differ in how far they are off, so that rules drop some and keep others.
    x = rng.normal(size=shape) * scale * rng.choice([0.01, 0.3, 1.0], (shape[0], 1))
    rollout = -5 * rng.random(shape)
    old = rollout if scale == 0 else rollout + x.clip(-1e4, 1e4)
    junk = rng.choice([np.nan, np.inf, -np.inf, 1e300], (2, *shape))
    ages = rng.choice([-1, 0, 1, 2, 3, 4, 5, 40], shape)
    return Batch(*map(torch.from_numpy, (np.where(mask, old, junk[0]), np.where(mask, rollout, junk[1]), mask, ages)))


@st.composite
def verl_configs(draw: st.DrawFn) -> CorrectionConfig:
    """All modes, alone and together, vetoes, thresholds by age."""
    modes = draw(st.lists(st.sampled_from(REJECTION_MODES), max_size=3, unique=True))
    bounds = [draw(st.sampled_from(BANDS if mode.endswith("k1") else BOUNDS)) for mode in modes]
    level = draw(st.sampled_from([None, "token", "sequence"]))
    return CorrectionConfig(
        rollout_is=level,
        rollout_is_threshold=draw(st.sampled_from([1.0, 1.2, 2.0, 8.0])),
        rollout_is_batch_normalize=level is not None and draw(st.booleans()),
        rollout_rs=", ".join(modes) or None,
        rollout_rs_threshold=",".join(bounds) or None,
        rollout_token_veto_threshold=draw(st.sampled_from([None, None, 1e-4, 0.3, 0.9])),
        thresholds_by_age=draw(st.sampled_from([None, BY_AGE])),
        verl_compatible_k1=draw(st.booleans()),
        compatible_metrics=draw(st.sampled_from(COMPATIBLE)),
    )


@st.composite
def skyrl_configs(draw: st.DrawFn) -> CorrectionConfig:
    """All stages, alone and together."""
    block = {name: draw(st.sampled_from(values)) for name, values in STAGES.items()}
    by_age, compatible = draw(st.sampled_from([None, BY_AGE])), draw(st.sampled_from(COMPATIBLE))
    return CorrectionConfig(skyrl=block, thresholds_by_age=by_age, compatible_metrics=compatible)


CONFIGS = st.one_of(verl_configs(), skyrl_configs())

# The plain correction: one Python list of log ratios a row, no tensors.

Weights, Kept = list[float], list[bool]


def bounded(x: float) -> float:
    return max(-20.0, min(20.0, x))


def factor_of(config: CorrectionConfig, age: int) -> float:
    return config.thresholds_by_age[sum(age > last for last in LAST_AGES)] if config.thresholds_by_age else 1.0


def band_of(text: str, inverted: bool) -> tuple[float, float]:
    """A band of ratios as (lowest, highest) x; inverted: verl's code bounds the inverse ratio."""
    parts = [float(part) for part in text.split("_")]
    low, high = parts if len(parts) == 2 else (1 / parts[0], parts[0])
    return (-math.log(high), -math.log(low)) if inverted else (math.log(low), math.log(high))


def plain_correction(batch: Batch, config: CorrectionConfig) -> tuple[list[Weights] | None, list[Kept]]:
    """Weights and mask [B, T] as nested lists, zero where masked; without normalisation."""
    weights, kept = [], []
    columns = (values.tolist() for values in (batch.mask, batch.old, batch.rollout, batch.ages))
    for mask, olds, rollouts, ages in zip(*columns, strict=True):
        places = [place for place, is_token in enumerate(mask) if is_token]
        x = [olds[place] - rollouts[place] for place in places]
        factors = [factor_of(config, ages[place]) for place in places]
        oldest = factor_of(config, max((ages[place] for place in places), default=0))
        plain = _plain_skyrl if config.skyrl else _plain_verl
        row_weights, row_kept = plain(x, factors, oldest, config) if x else ([], [])
        weights.append([0.0] * len(mask))
        kept.append([False] * len(mask))
        for place, weight, keep in zip(places, row_weights or [0.0] * len(x), row_kept, strict=True):
            weights[-1][place], kept[-1][place] = weight, keep
    weighs = config.skyrl.tis_ratio_type if config.skyrl else config.rollout_is
    return weights if weighs else None, kept


def _plain_weights(
    level: str | None, x: Weights, whole: float, factors: Weights, oldest: float, limit: float
) -> Weights:
    if level == "token":
        return [min(math.exp(bounded(v)), limit**factor) for v, factor in zip(x, factors, strict=True)]
    return [min(math.exp(bounded(whole)), limit**oldest)] * len(x) if level else []


def _plain_verl(x: Weights, factors: Weights, oldest: float, config: CorrectionConfig) -> tuple[Weights, Kept]:
    weights = _plain_weights(config.rollout_is, x, sum(x), factors, oldest, config.rollout_is_threshold)
    veto = config.rollout_token_veto_threshold
    kept = [veto is None or all(value >= math.log(veto) for value in x)] * len(x)
    modes = (config.rollout_rs or "").split(", ")
    for mode, bound in zip(modes, (config.rollout_rs_threshold or "").split(","), strict=True):
        if not mode:
            continue
        *_, level, kind = mode.split("_")
        estimate = {"k1": lambda v: -v, "k2": lambda v: v * v / 2, "k3": lambda v: math.expm1(v) - v}[kind]
        values = [estimate(bounded(value)) for value in x]
        whole = {"token": 0.0, "sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[level]
        for place, own in enumerate(values):
            value, factor = (own, factors[place]) if level == "token" else (whole, oldest)
            if kind == "k1":
                lowest, highest = band_of(bound, config.verl_compatible_k1)
                kept[place] &= lowest * factor <= -value <= highest * factor
            else:
                kept[place] &= value <= float(bound) * factor
    return weights, kept


def _plain_skyrl(x: Weights, factors: Weights, oldest: float, config: CorrectionConfig) -> tuple[Weights, Kept]:
    block = config.skyrl
    assert block is not None

    def inside(value: float, low: float | None, high: float | None, factor: float) -> bool:
        above = low is None or value >= math.log(low) * factor
        return above and (high is None or value <= math.log(high) * factor)

    # Dropped tokens would not count, but no stage comes before this one.
    low, high = block.outlier_token_is_threshold_low, block.outlier_token_is_threshold_high
    kept = [all(inside(value, low, high, factor) for value, factor in zip(x, factors, strict=True))] * len(x)
    low, high = block.token_mask_is_threshold_low, block.token_mask_is_threshold_high
    if low is not None and high is not None:
        kept = [keep and inside(bounded(v), low, high, f) for keep, v, f in zip(kept, x, factors, strict=True)]
    left = [value for value, keep in zip(x, kept, strict=True) if keep]
    level = block.tis_ratio_type
    limit = block.sequence_tis_ratio_clip_high if level == "sequence" else block.token_tis_ratio_clip_high
    weights = _plain_weights(level, x, sum(left), factors, oldest, limit)
    total, stays = sum(left), True
    if block.sequence_mask_metric == "product":
        stays = inside(total, block.product_mask_low, block.product_mask_high, oldest)
    elif block.sequence_mask_metric == "geometric":
        stays = inside(total / max(len(left), 1), block.geo_mask_low, block.geo_mask_high, oldest)
    return weights, [keep and stays for keep in kept]
