"""What holds for every correction and every batch: bounds, invariances, and equality with a plain one."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.batch.layout import Layout
from learner.correction import Correction, CorrectionConfig, correct, correct_tokens, weight_divisor
from learner.correction.statistics import age_buckets
from learner.stats import Stats
from tests.support.correction import CONFIGS, Batch, batches, plain_correction

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
