"""The correction against golden values: verl's fields (D, E, F, G, H08) and SkyRL's (K).

Where the public implementations count empty rows and padding, `compatible_metrics` reproduces them; without it,
empty rows take no part in any mean.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from learner.correction import Correction, CorrectionConfig, correct

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "spo_golden.json").read_text(encoding="utf-8"))
CASES = {case["id"]: case for case in GOLDEN["cases"]}


def rows(values: list) -> torch.Tensor:
    return torch.tensor([[float(value) for value in row] for row in values], dtype=torch.float64)


def fixture(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = GOLDEN["fixtures"][name]
    return tuple(rows(values[key]) for key in ("old_log_prob", "rollout_log_prob", "response_mask"))


def of_log_ratio(log_ratio: list, mask: list, config: CorrectionConfig) -> Correction:
    x = rows(log_ratio)
    return correct(x, torch.zeros_like(x), rows(mask), config)


def check_metrics(result: Correction, expected: dict[str, float], tolerance: float, leave_out: tuple = ()) -> None:
    wrong = {
        name: (result.metrics.get(f"rollout_corr/{name}"), value)
        for name, value in expected.items()
        if name not in leave_out
        and result.metrics.get(f"rollout_corr/{name}") != pytest.approx(value, rel=tolerance, abs=2e-9)
    }
    assert not wrong


def check_mask(result: Correction, expected: list) -> None:
    assert result.mask.int().tolist() == expected


@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("name", ["D01", "D02", "D03", "D04", "D05", "D06", "D07"])
def test_weights_and_their_statistics(name, compatible):
    case = CASES[name]
    inputs = case["inputs"]
    config = CorrectionConfig(
        rollout_is=inputs["level"],
        rollout_is_threshold=inputs["threshold"],
        rollout_is_batch_normalize=inputs["batch_normalize"],
        compatible_metrics=compatible,
    )
    result = correct(*fixture(inputs["fixture"]), config)
    torch.testing.assert_close(result.weights, rows(case["expected"]["weights"]), rtol=1e-6, atol=1e-9)
    expected = dict(case["expected"]["metrics"])
    if not compatible:
        # verl of the golden file raised small weights to 1 / C here; today's counts the weights as they are applied.
        del expected["rollout_is_eff_sample_size"]
    if not compatible and inputs["fixture"] == "B":
        # The empty row takes no part: statistics over rows are those of the three others.
        rest = correct(*(tensor[:3] for tensor in fixture("B")), config)
        assert result.metrics == rest.metrics
        expected = {key: value for key, value in expected.items() if key in ("rollout_is_mean", "rollout_is_std")}
    check_metrics(result, expected, case["rel_tol"])


def test_log_ratios_are_bounded_at_20():
    case = CASES["D08"]
    inputs = case["inputs"]
    for level in ("token", "sequence"):
        config = CorrectionConfig(rollout_is=level, rollout_is_threshold=inputs["threshold"])
        result = of_log_ratio(inputs["log_ratio"], inputs["mask"], config)
        torch.testing.assert_close(result.weights, rows(case["expected"][f"{level}_weights"]), rtol=1e-6, atol=1e-12)


def test_nan_in_masked_places_does_not_leak():
    case = CASES["D09"]
    result = of_log_ratio(case["inputs"]["log_ratio"], case["inputs"]["mask"], CorrectionConfig(rollout_is="token"))
    torch.testing.assert_close(result.weights, rows(case["expected"]["recommended"]))
    assert all(math.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize("name", [f"E{number:02}" for number in range(1, 16)] + ["E17", "E18"])
def test_rejection_masks_and_their_statistics(name):
    case = CASES[name]
    inputs = case["inputs"]
    fields = {key: inputs[key] for key in ("rollout_rs", "rollout_rs_threshold")}
    config = CorrectionConfig(**fields, rollout_is=None, verl_compatible_k1=True, compatible_metrics=True)
    result = correct(*fixture(inputs["fixture"]), config)
    assert result.weights is None
    check_mask(result, case["expected"]["mask"])
    check_metrics(result, case["expected"]["metrics"], case["rel_tol"])


@pytest.mark.parametrize("name", ["E01", "E04", "E13"])
def test_bands_symmetric_in_log_space_mean_the_same_with_and_without_verls_sign(name):
    inputs = CASES[name]["inputs"]
    fields = {key: inputs[key] for key in ("rollout_rs", "rollout_rs_threshold")}
    result = correct(*fixture(inputs["fixture"]), CorrectionConfig(**fields))
    check_mask(result, CASES[name]["expected"]["mask"])


@pytest.mark.parametrize(("compatible", "key"), [(True, "verl_code_mask"), (False, "documented_mask")])
def test_an_asymmetric_band_holds_ratios_or_with_verls_sign_their_inverse(compatible, key):
    case = CASES["E16"]
    log_ratio = [[math.log(ratio) for ratio in case["inputs"]["ratios"]]]
    config = CorrectionConfig(
        rollout_rs="token_k1", rollout_rs_threshold=case["inputs"]["threshold"], verl_compatible_k1=compatible
    )
    check_mask(of_log_ratio(log_ratio, [[1] * 6], config), [case["expected"][key]])


def test_an_asymmetric_band_of_rows_keeps_the_documented_side():
    config = CorrectionConfig(rollout_rs="seq_sum_k1", rollout_rs_threshold="0.3_5.0")
    result = correct(*fixture("A"), config)
    # Products are 4.07, 0.208, 0.989 and 0.994: verl's code drops the first (E17), the band means the second.
    assert result.mask.any(-1).tolist() == [True, False, True, True]


def test_rows_without_tokens_take_no_part_in_masked_fractions():
    config = CorrectionConfig(rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01)
    result = correct(*fixture("B"), config)
    assert result.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("row", CASES["E19"]["expected"]["rows"], ids=str)
def test_thresholds_and_modes_are_checked(row):
    def made() -> CorrectionConfig:
        return CorrectionConfig(rollout_rs=row["rollout_rs"], rollout_rs_threshold=row["threshold"])

    if row["verl"] == "accepted" and row["threshold"] != "2.0_0.5":
        assert len(made().masks) == 2
        return
    with pytest.raises(ValueError, match="rollout_rs"):
        made()


@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("name", ["F01", "F02"])
def test_divergences_and_perplexities(name, compatible):
    case = CASES[name]
    result = correct(*fixture(case["inputs"]["fixture"]), CorrectionConfig(compatible_metrics=compatible))
    expected = case["expected"]
    if not compatible and name == "F02":
        expected = {key: expected[key] for key in ("kl", "k3_kl", "chi2_token")}
        rest = correct(*(tensor[:3] for tensor in fixture("B")), CorrectionConfig())
        assert result.metrics == rest.metrics
    check_metrics(result, expected, case["rel_tol"])


def test_identical_policies_diverge_by_nothing():
    old, _, mask = fixture("A")
    check_metrics(correct(old, old, mask, CorrectionConfig()), CASES["F03"]["expected"], CASES["F03"]["rel_tol"])


def test_summed_log_ratios_are_bounded_before_they_are_doubled():
    case = CASES["F04"]
    result = of_log_ratio(case["inputs"]["log_ratio"], case["inputs"]["mask"], CorrectionConfig())
    check_metrics(result, case["expected"], case["rel_tol"])


def test_one_catastrophic_token_vetoes_its_row():
    case = CASES["G01"]
    inputs = case["inputs"]
    log_ratio = [[math.log(ratio) for ratio in row] for row in inputs["ratios"]]
    config = CorrectionConfig(rollout_is=None, rollout_token_veto_threshold=inputs["veto"])
    result = of_log_ratio(log_ratio, inputs["mask"], config)
    check_mask(result, case["expected"]["mask"])
    expected = {key: value for key, value in case["expected"].items() if key != "mask"}
    check_metrics(result, expected, case["rel_tol"])


def test_a_preset_from_end_to_end():
    case = CASES["H08"]
    result = correct(*fixture("A"), CorrectionConfig.preset("decoupled_k3_rs_token_tis"))
    torch.testing.assert_close(result.weights, rows(case["expected"]["weights"]), rtol=1e-6, atol=1e-9)
    check_mask(result, case["expected"]["mask"])
    assert set(case["expected"]["metric_keys"]) <= set(result.metrics)


@pytest.mark.parametrize("name", sorted(GOLDEN["presets"]))
def test_presets_have_verls_fields(name):
    config = CorrectionConfig.preset(name)
    assert {key: getattr(config, key) for key in GOLDEN["presets"][name]} == GOLDEN["presets"][name]


@pytest.mark.parametrize("name", [f"K{number:02}" for number in range(1, 10)])
def test_skyrls_spelling(name):
    case = CASES[name]
    overrides = case["inputs"]["config_overrides"]
    old, rollout, mask = fixture(case["inputs"]["fixture"])
    config = CorrectionConfig(skyrl=overrides, compatible_metrics=True)
    result = correct(old, rollout, mask, config)
    check_mask(result, case["expected"]["mask"])
    check_metrics(result, case["expected"]["metrics"], 1e-6)
    expected = case["expected"].get("tis_ratio")
    if expected is None:
        assert result.weights is None
    else:
        # SkyRL leaves ratios in masked places, where nothing reads them; here they are zero.
        wanted = rows(expected).expand_as(mask) * mask
        torch.testing.assert_close(result.weights, wanted, rtol=1e-6, atol=1e-9)


def test_skyrls_statistics_without_padding_and_empty_rows():
    result = correct(*fixture("B"), CorrectionConfig(skyrl={"sequence_mask_metric": "geometric"}))
    assert result.metrics["rollout_corr/is_ratio_min"] == pytest.approx(0.272531793034)
    assert result.metrics["rollout_corr/geo_sequence_mask_masked_ratio"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_effective_sample_size_is_that_of_the_applied_weights(level):
    old, rollout, mask = fixture("A")
    result = correct(old, rollout, mask, CorrectionConfig(rollout_is=level))
    weights = result.weights[mask.bool()]
    expected = weights.sum() ** 2 / (len(weights) * weights.square().sum())
    assert result.metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(expected.item())


def test_where_rows_are_empty_the_compatible_extremes_of_row_weights_count_them_with_ratio_one():
    """verl takes the extremes over all rows; the product of no ratios is 1."""
    old, mask = torch.full((2, 2), -1.0), torch.tensor([[1, 1], [0, 0]])
    for x, extreme in ((0.5, "rollout_is_min"), (-0.5, "rollout_is_max")):
        plain, compatible = (
            correct(old, old - x, mask, CorrectionConfig(compatible_metrics=choice)).metrics for choice in (False, True)
        )
        assert plain[f"rollout_corr/{extreme}"] == pytest.approx(math.exp(2 * x))
        assert compatible[f"rollout_corr/{extreme}"] == 1
        # The empty row's mean weight is 0, and beyond the lower bound.
        assert compatible["rollout_corr/rollout_is_seq_min"] == 0
        assert compatible["rollout_corr/rollout_is_seq_fraction_low"] >= 0.5


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_band_of_weights_sets_what_is_outside_to_zero_and_masks_nothing(level):
    x = torch.tensor([[0.0, math.log(6), math.log(0.4)], [math.log(2), 0.0, 0.0]], dtype=torch.float64)
    mask = torch.ones_like(x)
    config = CorrectionConfig(rollout_is=level, rollout_is_threshold="0.5_5.0")
    result = correct(x, torch.zeros_like(x), mask, config)
    ratios = x.exp() if level == "token" else x.sum(1, keepdim=True).exp().expand_as(x)
    inside = (ratios >= 0.5) & (ratios <= 5.0)
    torch.testing.assert_close(result.weights, torch.where(inside, ratios, 0.0))
    assert bool(result.mask.all())
    assert result.metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(float((~inside).double().mean()))


@pytest.mark.parametrize(
    ("metric", "x"),
    [("product", [30.0, -22.0]), ("product", [-30.0, 31.0]), ("geometric", [9990.0] + [0.0] * 2999)],
    ids=["product high", "product high again", "geometric"],
)
def test_skyrls_rows_are_bounded_by_their_sum_or_mean_and_no_single_token_is_clipped(metric, x):
    row = torch.tensor([x, [0.0] * len(x)], dtype=torch.float64)
    config = CorrectionConfig(skyrl={"sequence_mask_metric": metric, "product_mask_high": 2.0})
    result = correct(row, torch.zeros_like(row), torch.ones_like(row), config)
    assert result.mask.any(1).tolist() == [False, True]


def test_without_a_level_there_are_no_weights_and_the_gap_is_still_told():
    result = correct(*fixture("A"), CorrectionConfig(rollout_is=None))
    assert result.weights is None
    assert "rollout_corr/kl" in result.metrics
    assert "rollout_corr/rollout_is_mean" not in result.metrics


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"\[B, T\]; given .*rollout_logprobs \[2, 2\]"):
        correct(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2, 3), CorrectionConfig())
