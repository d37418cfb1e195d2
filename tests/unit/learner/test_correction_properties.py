"""What holds for every correction and every batch: bounds, invariances, and equality with a second one.

That one is in plain Python, token by token.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import CorrectionConfig
from common.config.correction import REJECTION_MODES
from learner.batch.layout import Layout
from learner.correction import Correction, correct, correct_tokens, weight_divisor
from learner.correction.statistics import age_buckets
from learner.stats import Stats

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


PREFIX = "rollout_corr/"


def corrected(batch: Batch, config: CorrectionConfig) -> Correction:
    """A correction whose metrics are all finite."""
    correction = correct(batch.old, batch.rollout, batch.mask, config, batch.ages)
    assert all(abs(value) < 3.4e38 for value in correction.metrics.values())
    return correction


def packed(batch: Batch, config: CorrectionConfig) -> tuple[torch.Tensor | None, torch.Tensor, Stats]:
    """The same tokens without padding: weights not normalised, mask, statistics."""
    layout, stats = Layout.of_lengths(batch.mask.sum(1).tolist()), Stats()
    tokens = batch.of(lambda values: values[batch.mask])
    correction = correct_tokens(tokens.old, tokens.rollout, layout, config, stats, tokens.ages)
    return correction.weights, correction.keep, stats


def assert_metrics(measured: dict[str, float], expected: dict[str, float]) -> None:
    """Equal but for rounding; a spread is the root of a difference, and rounded as its largest value is."""
    assert measured.keys() == expected.keys()
    for name, value in expected.items():
        slack = 1e-9
        if name.endswith("std"):
            peaks = [abs(expected.get(name.removesuffix("std") + end, 0.0)) for end in ("max", "min")]
            slack = 1e-7 * max(1.0, *peaks)
        assert measured[name] == pytest.approx(value, rel=1e-9, abs=slack), name


@settings(max_examples=20)
@given(batches(), CONFIGS)
def test_weights_and_mask_are_those_of_a_plain_loop_over_tokens(batch, config):
    result = corrected(Batch(batch.old.clone().requires_grad_(), batch.rollout, batch.mask, batch.ages), config)
    weights, mask = plain_correction(batch, config)
    assert result.mask.tolist() == mask
    assert (result.weights is None) == (weights is None)
    if weights is not None:
        expected = torch.tensor(weights, dtype=torch.float64)
        if config.rollout_is_batch_normalize and batch.mask.any():
            of_rows = expected.amax(1)[batch.mask.any(1)]
            mean = (expected[batch.mask] if config.rollout_is == "token" else of_rows).mean()
            expected = expected / mean if mean > 1e-8 else expected
        torch.testing.assert_close(result.weights, expected, rtol=1e-9, atol=0)
        assert not result.weights.requires_grad


def test_buckets_of_ages_are_0_1_2_3_to_4_and_5_or_more_versions():
    assert age_buckets(torch.tensor([-3, 0, 1, 2, 3, 4, 5, 6, 1000])).tolist() == [0, 0, 1, 2, 3, 3, 4, 4, 4]


@settings(max_examples=20)
@given(batches(), CONFIGS, st.lists(st.integers(0, 6), max_size=3), st.randoms())
def test_packing_parts_and_order_of_rows_change_nothing(batch, config, cuts, random):
    expected = corrected(batch, config)
    order = list(range(len(batch.mask)))
    random.shuffle(order)
    batch = batch.of(lambda values: values[order])
    weights, keep, _ = packed(batch, config)
    assert torch.equal(keep, expected.mask[order][batch.mask])
    if weights is not None:
        factor = weight_divisor(expected.metrics) if config.rollout_is_batch_normalize else 1.0
        torch.testing.assert_close(weights / factor, expected.weights[order][batch.mask], rtol=1e-9, atol=0)
    merged, keeps = Stats(), []
    for start, end in itertools.pairwise([0, *sorted(min(cut, len(order)) for cut in cuts), len(order)]):
        _, of_part, stats = packed(batch.of(lambda values, part=slice(start, end): values[part]), config)
        merged.update(stats)
        keeps.append(of_part)
    assert torch.equal(torch.cat(keeps), keep)
    if not config.compatible_metrics:  # which count padding
        assert_metrics(merged.reduce() if merged.reduce(names=["tokens"])["tokens"] else {}, expected.metrics)


@settings(max_examples=20)
@given(batches(empty=False), CONFIGS)
def test_metrics_are_those_of_the_result_and_none_is_left_out(batch, config):
    result = corrected(batch, config)
    calm = Batch(torch.zeros_like(batch.old), torch.zeros_like(batch.old), batch.mask, batch.ages)
    # What is not finite would be left out: the names are those of the tamest batch.
    assert result.metrics.keys() == corrected(calm, config).metrics.keys()
    tokens, full = int(batch.mask.sum()), batch.mask.any(1)
    metrics = {name.removeprefix(PREFIX): value for name, value in result.metrics.items()}
    assert metrics["masked_fraction"] == pytest.approx(1 - int(result.mask.sum()) / tokens)
    assert metrics["seq_masked_fraction"] == pytest.approx(1 - int(result.mask.any(1).sum()) / int(full.sum()))
    weights = result.mask.double() if result.weights is None else result.weights * result.mask
    of_rows = weights.sum(1)[full] / batch.mask.sum(1)[full]
    size = float(of_rows.sum() ** 2 / (len(of_rows) * (of_rows**2).sum())) if bool(of_rows.any()) else 0.0
    assert metrics["eff_sample_size"] == pytest.approx(size, rel=1e-9)
    assert sum(value for name, value in metrics.items() if name.endswith("/fraction")) == pytest.approx(1)


@settings(max_examples=20)
@given(batches(empty=False), CONFIGS, st.integers(0, 2**32 - 1))
def test_tokens_without_finite_logprobs_are_dropped_and_counted(batch, config, seed):
    torch.manual_seed(seed)
    hit = (torch.rand(batch.mask.shape) < 0.3) & batch.mask
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)[torch.randint(3, hit.shape)]
    first = torch.rand(hit.shape) < 0.5
    old, rollout = torch.where(hit & first, bad, batch.old), torch.where(hit & ~first, bad, batch.rollout)
    result = corrected(Batch(old, rollout, batch.mask, batch.ages), config)
    assert not bool((result.mask & hit).any())
    assert result.weights is None or bool(result.weights.isfinite().all())
    share = int(hit.sum()) / int(batch.mask.sum())
    assert result.metrics[f"{PREFIX}nonfinite_fraction"] == pytest.approx(share)
