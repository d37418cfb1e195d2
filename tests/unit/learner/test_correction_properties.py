"""What holds for every correction and every batch: bounds, invariances, and equality with a plain one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.correction import Correction, CorrectionConfig, Layout, correct, correct_tokens
from learner.correction.statistics import age_buckets
from learner.stats import Stats
from tests.support.correction import (
    Batch,
    batches,
    configs,
    plain_correction,
    row_order,
    skyrl_configs,
    verl_configs,
    widened,
)

steady = settings(derandomize=True, deadline=None, max_examples=50, database=None)
FLOAT32_MAX = 3.4e38


def corrected(batch: Batch, config: CorrectionConfig) -> Correction:
    return correct(batch.old, batch.rollout, batch.mask, config, batch.ages)


def packed(batch: Batch, config: CorrectionConfig) -> tuple[torch.Tensor | None, torch.Tensor, Stats]:
    """The same tokens without padding: weights not normalised, mask, statistics."""
    old, rollout, ages = batch.tokens()
    layout, stats = Layout.of_lengths(batch.mask.sum(1).tolist()), Stats()
    correction = correct_tokens(old, rollout, layout, config, stats, ages)
    return correction.weights, correction.keep, stats


def metrics_of(stats: Stats) -> dict[str, float]:
    """Metrics; none where there are no tokens."""
    return stats.reduce() if stats.reduce(names=["tokens"])["tokens"] else {}


def assert_metrics(measured: dict[str, float], expected: dict[str, float]) -> None:
    """Equal but for rounding; a spread is the root of a difference, and rounded as its largest value is."""
    assert measured.keys() == expected.keys()
    for name, value in expected.items():
        slack = 1e-9
        if name.endswith("std"):
            peaks = [abs(expected.get(name.removesuffix("std") + end, 0.0)) for end in ("max", "min")]
            slack = 1e-7 * max(1.0, *peaks)
        assert measured[name] == pytest.approx(value, rel=1e-9, abs=slack), name


def assert_same(result: Correction, expected: Correction) -> None:
    assert torch.equal(result.mask, expected.mask)
    assert (result.weights is None) == (expected.weights is None)
    if expected.weights is not None:
        torch.testing.assert_close(result.weights, expected.weights, rtol=1e-9, atol=0)
    assert_metrics(result.metrics, expected.metrics)


KINDS = st.one_of(
    st.tuples(batches(), configs()),
    st.tuples(batches(near=True), configs(scheduled=True)),
    st.tuples(batches(near=True), skyrl_configs()),
)


@settings(steady, max_examples=300)
@given(KINDS)
def test_weights_and_mask_are_those_of_a_plain_loop_over_tokens(kind):
    batch, config = kind
    config = config.model_copy(update={"rollout_is_batch_normalize": False})
    result = corrected(batch, config)
    weights, mask = plain_correction(batch, config)
    assert result.mask.tolist() == mask
    assert (result.weights is None) == (weights is None)
    if weights is not None:
        torch.testing.assert_close(result.weights, torch.tensor(weights, dtype=torch.float64), rtol=1e-9, atol=0)


def test_buckets_of_ages_are_0_1_2_3_to_4_and_5_or_more_versions():
    ages = torch.tensor([-3, 0, 1, 2, 3, 4, 5, 6, 1000])
    assert age_buckets(ages).tolist() == [0, 0, 1, 2, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_token_counts_by_its_own_age_and_a_row_by_its_oldest_token(level):
    x = torch.full((2, 2), 1.0, dtype=torch.float64)
    ages = torch.tensor([[0, 5], [1, 0]])
    config = CorrectionConfig(rollout_is=level, rollout_is_threshold=2.0, thresholds_by_age=[1, 0.5, 1, 1, 0.25])
    weights = correct(x, torch.zeros_like(x), torch.ones(2, 2), config, ages).weights
    own, oldest = [[2.0, 2**0.25], [2**0.5, 2.0]], [[2**0.25] * 2, [2**0.5] * 2]
    torch.testing.assert_close(weights, torch.tensor(own if level == "token" else oldest, dtype=torch.float64))


@steady
@given(batches(empty=False), verl_configs().filter(lambda config: config.rollout_is_batch_normalize))
def test_normalised_weights_have_mean_one_over_tokens_or_rows(batch, config):
    weights = corrected(batch, config).weights
    of_rows = weights.amax(1)[batch.mask.any(1)]
    mean = (weights[batch.mask] if config.rollout_is == "token" else of_rows).mean()
    assert mean.item() == pytest.approx(1.0, rel=1e-9)


@steady
@given(batches(empty=False), configs(around_one=True))
def test_identical_policies_are_left_alone(batch, config):
    batch = Batch(batch.old, batch.old.clone(), batch.mask, batch.ages)
    result = corrected(batch, config)
    assert torch.equal(result.mask, batch.mask)
    assert result.weights is None or torch.equal(result.weights, batch.mask.double())
    zero = ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max")
    for name in (*zero, "log_ppl_diff_min", "masked_fraction", "seq_masked_fraction", "nonfinite_fraction"):
        assert result.metrics[f"rollout_corr/{name}"] == 0, name
    ones = {
        "ppl_ratio",
        "eff_sample_size",
        "rollout_is_mean",
        "rollout_is_min",
        "rollout_is_max",
        "rollout_is_seq_mean",
    }
    for name in ones & {name.removeprefix("rollout_corr/") for name in result.metrics}:
        assert result.metrics[f"rollout_corr/{name}"] == 1, name
    for name, value in result.metrics.items():
        if name.endswith(("_std", "_fraction_high", "_fraction_low", "masked_fraction", "masked_ratio", "_deviation")):
            assert value == 0, name


@steady
@given(batches(), configs(), st.integers(0, 3), st.integers(0, 3), st.integers(0, 2))
def test_padding_and_masked_rows_change_nothing(batch, config, left, right, rows):
    result, expected = corrected(widened(batch, left, right, rows), config), corrected(batch, config)
    height, width = batch.mask.shape
    inner = (slice(0, height), slice(left, left + width))
    weights = None if result.weights is None else result.weights[inner]
    assert int(result.mask.sum()) == int(result.mask[inner].sum())
    assert_same(Correction(weights, result.mask[inner], result.metrics), expected)


@steady
@given(batches(), configs(), st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(batch, config, random):
    order = list(range(len(batch.mask)))
    random.shuffle(order)
    result, expected = corrected(row_order(batch, order), config), corrected(batch, config)
    weights = None if expected.weights is None else expected.weights[order]
    assert_same(result, Correction(weights, expected.mask[order], expected.metrics))


@steady
@given(batches(), configs())
def test_packed_tokens_equal_padded_rows(batch, config):
    expected = corrected(batch, config)
    weights, keep, stats = packed(batch, config)
    assert torch.equal(keep, expected.mask[batch.mask])
    if weights is not None:
        factor = expected.metrics.get("rollout_corr/rollout_is_batch_norm_factor", 1.0)
        torch.testing.assert_close(weights / factor, expected.weights[batch.mask], rtol=1e-9, atol=0)
    assert_metrics(metrics_of(stats), expected.metrics)


@steady
@given(batches(), configs(), st.lists(st.integers(0, 6), max_size=3))
def test_statistics_of_parts_add_up_to_those_of_the_whole(batch, config, cuts):
    count = len(batch.mask)
    borders = [0, *sorted(min(cut, count) for cut in cuts), count]
    merged, keeps = Stats(), []
    for start, end in itertools.pairwise(borders):
        part = slice(start, end)
        _, keep, stats = packed(batch.of(lambda values, part=part: values[part]), config)
        merged.update(stats)
        keeps.append(keep)
    expected = corrected(batch, config)
    assert torch.equal(torch.cat(keeps), expected.mask[batch.mask])
    assert_metrics(metrics_of(merged), expected.metrics)


@steady
@given(batches(empty=False), configs(), st.booleans())
def test_every_statistic_is_finite_and_none_is_left_out(batch, config, compatible):
    config = config.model_copy(update={"compatible_metrics": compatible})
    metrics = corrected(batch, config).metrics
    calm = Batch(torch.zeros_like(batch.old), torch.zeros_like(batch.old), batch.mask, batch.ages)
    # What is not finite would be left out: the names are those of the tamest batch.
    assert metrics.keys() == corrected(calm, config).metrics.keys()
    assert all(abs(value) < FLOAT32_MAX for value in metrics.values())


@steady
@given(batches(empty=False), configs(), st.integers(0, 2**32 - 1))
def test_model_tokens_without_finite_logprobs_are_dropped_and_counted(batch, config, seed):
    torch.manual_seed(seed)
    hit = (torch.rand(batch.mask.shape) < 0.3) & batch.mask
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)[torch.randint(3, hit.shape)]
    first = torch.rand(hit.shape) < 0.5
    old, rollout = torch.where(hit & first, bad, batch.old), torch.where(hit & ~first, bad, batch.rollout)
    result = corrected(Batch(old, rollout, batch.mask, batch.ages), config)
    assert not bool((result.mask & hit).any())
    assert result.weights is None or bool(result.weights.isfinite().all())
    assert all(math.isfinite(value) for value in result.metrics.values())
    share = int(hit.sum()) / int(batch.mask.sum())
    assert result.metrics["rollout_corr/nonfinite_fraction"] == pytest.approx(share)


@steady
@given(batches(), configs(), st.booleans())
def test_a_batch_without_model_tokens_gives_nothing_and_raises_nothing(batch, config, compatible):
    config = config.model_copy(update={"compatible_metrics": compatible})
    nothing = Batch(batch.old, batch.rollout, torch.zeros_like(batch.mask), batch.ages)
    for masked in (nothing, nothing.of(lambda values: values[:0]), nothing.of(lambda values: values[:, :0])):
        result = corrected(masked, config)
        assert result.metrics == {}
        assert result.mask.shape == masked.mask.shape
        assert not bool(result.mask.any())
        assert result.weights is None or torch.equal(result.weights, torch.zeros(masked.mask.shape).double())


@steady
@given(batches(empty=False), verl_configs(), skyrl_configs())
def test_a_batch_of_which_nothing_is_left_is_told_and_raises_nothing(batch, verl, skyrl):
    far = Batch(batch.rollout - 15, batch.rollout, batch.mask, None)
    everything = {"rollout_token_veto_threshold": 1e-4, "thresholds_by_age": None}
    block = skyrl.skyrl.model_copy(update={"outlier_token_is_threshold_low": 1e-4})
    for config in (verl.model_copy(update=everything), skyrl.model_copy(update={"skyrl": block})):
        result = corrected(far, config)
        assert not bool(result.mask.any())
        assert result.metrics["rollout_corr/masked_fraction"] == 1
        assert result.metrics["rollout_corr/seq_masked_fraction"] == 1
        assert result.metrics["rollout_corr/eff_sample_size"] == 0
        assert all(math.isfinite(value) for value in result.metrics.values())


@steady
@given(batches(wild=False), configs())
def test_weights_carry_no_gradient(batch, config):
    old, rollout = batch.old.clone().requires_grad_(), batch.rollout.clone().requires_grad_()
    result = correct(old, rollout, batch.mask, config, batch.ages)
    assert result.weights is None or not result.weights.requires_grad


@steady
@given(batches(empty=False), configs(), st.booleans())
def test_masked_fractions_and_effective_sample_size_are_those_of_the_result(batch, config, compatible):
    config = config.model_copy(update={"compatible_metrics": compatible})
    result = corrected(batch, config)
    tokens, rows = int(batch.mask.sum()), int(batch.mask.any(1).sum())
    metrics = {name.removeprefix("rollout_corr/"): value for name, value in result.metrics.items()}
    assert metrics["masked_fraction"] == pytest.approx(1 - int(result.mask.sum()) / tokens)
    assert metrics["seq_masked_fraction"] == pytest.approx(1 - int(result.mask.any(1).sum()) / rows)
    weights = result.mask.double() if result.weights is None else result.weights * result.mask
    of_rows = weights.sum(1)[batch.mask.any(1)] / batch.mask.sum(1)[batch.mask.any(1)]
    wanted = float(of_rows.sum() ** 2 / (len(of_rows) * (of_rows**2).sum())) if bool(of_rows.any()) else 0.0
    assert metrics["eff_sample_size"] == pytest.approx(wanted, rel=1e-9)
    assert 0 <= metrics["eff_sample_size"] <= 1
    if batch.ages is not None:
        shares = [value for name, value in metrics.items() if name.endswith("/fraction")]
        assert sum(shares) == pytest.approx(1)
