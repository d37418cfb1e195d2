"""The correction against golden values: verl's fields (D, E, F, G, H08) and SkyRL's (K).

Where the public implementations count empty rows and padding, `compatible_metrics` reproduces them; without it,
empty rows take no part in any mean.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from common.config import AlgorithmConfig
from learner.correction import Correction, CorrectionConfig, correct
from tests.support.golden import GOLDEN, GOLDEN_FILE


def rows(values: list) -> torch.Tensor:
    return torch.tensor([[float(value) for value in row] for row in values], dtype=torch.float64)


def fixture(name: str = "A") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = GOLDEN_FILE["fixtures"][name]
    return tuple(rows(values[key]) for key in ("old_log_prob", "rollout_log_prob", "response_mask"))


def of_log_ratio(log_ratio: Any, mask: Any = None, **config: Any) -> Correction:
    x = log_ratio if isinstance(log_ratio, torch.Tensor) else rows(log_ratio)
    on = torch.ones_like(x) if mask is None else rows(mask)
    return correct(x, torch.zeros_like(x), on, CorrectionConfig(**config))


def of_fixture(name: str = "A", **config: Any) -> Correction:
    return correct(*fixture(name), CorrectionConfig(**config))


def assert_metrics(result: Correction, expected: dict[str, float], tolerance: float = 1e-6) -> None:
    measured = {name: result.metrics.get(f"rollout_corr/{name}") for name in expected}
    assert measured == pytest.approx(expected, rel=tolerance, abs=2e-9)


def assert_weights(result: Correction, expected: list, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(result.weights, rows(expected), rtol=1e-6, atol=tolerance)


@pytest.mark.parametrize("compatible", [False, True, "2026-01"])
@pytest.mark.parametrize("name", ["D01", "D02", "D03", "D04", "D05", "D06", "D07"])
def test_weights_and_their_statistics(name, compatible):
    case, inputs = GOLDEN[name], GOLDEN[name]["inputs"]
    config = CorrectionConfig(
        rollout_is=inputs["level"],
        rollout_is_threshold=inputs["threshold"],
        rollout_is_batch_normalize=inputs["batch_normalize"],
        compatible_metrics=compatible,
    )
    result = correct(*fixture(inputs["fixture"]), config)
    assert_weights(result, case["expected"]["weights"])
    expected = dict(case["expected"]["metrics"])
    if not compatible:
        # verl of the golden file raised small weights to 1 / C here; today's counts the weights as they are applied.
        del expected["rollout_is_eff_sample_size"]
    if not compatible and inputs["fixture"] == "B":
        # The empty row takes no part: statistics over rows are those of the three others.
        assert result.metrics == correct(*(tensor[:3] for tensor in fixture("B")), config).metrics
        expected = {key: value for key, value in expected.items() if key in ("rollout_is_mean", "rollout_is_std")}
    assert_metrics(result, expected, case["rel_tol"])


def test_log_ratios_are_bounded_at_20():
    inputs, expected = GOLDEN["D08"]["inputs"], GOLDEN["D08"]["expected"]
    for level in ("token", "sequence"):
        fields = {"rollout_is": level, "rollout_is_threshold": inputs["threshold"]}
        assert_weights(of_log_ratio(inputs["log_ratio"], inputs["mask"], **fields), expected[f"{level}_weights"], 1e-12)


def test_nan_in_masked_places_does_not_leak():
    inputs = GOLDEN["D09"]["inputs"]
    result = of_log_ratio(inputs["log_ratio"], inputs["mask"], rollout_is="token")
    assert_weights(result, GOLDEN["D09"]["expected"]["recommended"])
    assert all(math.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize("name", [f"E{number:02}" for number in range(1, 16)] + ["E17", "E18"])
def test_rejection_masks_and_their_statistics(name):
    case, inputs = GOLDEN[name], GOLDEN[name]["inputs"]
    fields = {key: inputs[key] for key in ("rollout_rs", "rollout_rs_threshold")}
    theirs = {"rollout_is": None, "verl_compatible_k1": True, "compatible_metrics": True}
    result = of_fixture(inputs["fixture"], **fields, **theirs)
    assert result.weights is None
    assert result.mask.int().tolist() == case["expected"]["mask"]
    assert_metrics(result, case["expected"]["metrics"], case["rel_tol"])
    if name in ("E01", "E04", "E13"):  # bands that are symmetric in log space mean the same without verl's sign
        assert torch.equal(of_fixture(inputs["fixture"], **fields).mask, result.mask)


@pytest.mark.parametrize(("compatible", "key"), [(True, "verl_code_mask"), (False, "documented_mask")])
def test_an_asymmetric_band_holds_ratios_or_verls_inverse(compatible, key):
    case = GOLDEN["E16"]
    fields = {"rollout_rs": "token_k1", "rollout_rs_threshold": case["inputs"]["threshold"]}
    ratios = rows([case["inputs"]["ratios"]])
    result = of_log_ratio(ratios.log(), verl_compatible_k1=compatible, **fields)
    assert result.mask.int().tolist() == [case["expected"][key]]
    # Products are 4.07, 0.208, 0.989 and 0.994: verl's code drops the first (E17), the band means the second.
    kept = of_fixture(rollout_rs="seq_sum_k1", rollout_rs_threshold="0.3_5.0").mask.any(-1)
    assert kept.tolist() == [True, False, True, True]


@pytest.mark.parametrize("row", GOLDEN["E19"]["expected"]["rows"], ids=str)
def test_thresholds_and_modes_are_checked(row):
    fields = {"rollout_rs": row["rollout_rs"], "rollout_rs_threshold": row["threshold"]}
    if row["verl"] == "accepted" and row["threshold"] != "2.0_0.5":
        assert len(CorrectionConfig(**fields).masks) == 2
        return
    with pytest.raises(ValueError, match="rollout_rs"):
        CorrectionConfig(**fields)


@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("name", ["F01", "F02"])
def test_divergences_and_perplexities(name, compatible):
    case = GOLDEN[name]
    result = of_fixture(case["inputs"]["fixture"], compatible_metrics=compatible)
    expected = case["expected"]
    if not compatible and name == "F02":
        expected = {key: expected[key] for key in ("kl", "k3_kl", "chi2_token")}
        assert result.metrics == correct(*(tensor[:3] for tensor in fixture("B")), CorrectionConfig()).metrics
    assert_metrics(result, expected, case["rel_tol"])


def test_divergences_of_equal_and_of_far_policies():
    (old, _, mask), inputs = fixture(), GOLDEN["F04"]["inputs"]
    # Summed log ratios are bounded before they are doubled.
    far = of_log_ratio(inputs["log_ratio"], inputs["mask"])
    for name, result in {"F03": correct(old, old, mask, CorrectionConfig()), "F04": far}.items():
        assert_metrics(result, GOLDEN[name]["expected"], GOLDEN[name]["rel_tol"])


def test_one_catastrophic_token_vetoes_its_row():
    inputs, expected = GOLDEN["G01"]["inputs"], dict(GOLDEN["G01"]["expected"])
    veto = {"rollout_is": None, "rollout_token_veto_threshold": inputs["veto"]}
    result = of_log_ratio(rows(inputs["ratios"]).log(), inputs["mask"], **veto)
    assert result.mask.int().tolist() == expected.pop("mask")
    assert_metrics(result, expected, GOLDEN["G01"]["rel_tol"])


def test_a_preset_from_end_to_end():
    expected = GOLDEN["H08"]["expected"]
    result = correct(*fixture(), CorrectionConfig.preset("decoupled_k3_rs_token_tis"))
    assert_weights(result, expected["weights"])
    assert result.mask.int().tolist() == expected["mask"]
    assert set(expected["metric_keys"]) <= set(result.metrics)


@pytest.mark.parametrize("name", sorted(GOLDEN_FILE["presets"]))
def test_presets_have_verls_fields(name):
    fields, config = dict(GOLDEN_FILE["presets"][name]), CorrectionConfig.preset(name)
    algorithm = AlgorithmConfig(correction=config)
    assert (algorithm.proximal == "rollout", algorithm.loss) == (fields.pop("bypass_mode"), fields.pop("loss_type"))
    assert {key: getattr(config, key) for key in fields} == fields


@pytest.mark.parametrize("name", [f"K{number:02}" for number in range(1, 10)])
def test_skyrls_spelling(name):
    case = GOLDEN[name]
    _, _, mask = fixture(case["inputs"]["fixture"])
    given = case["inputs"]["config_overrides"]
    result = of_fixture(case["inputs"]["fixture"], skyrl=given, compatible_metrics=True)
    assert result.mask.int().tolist() == case["expected"]["mask"]
    assert_metrics(result, case["expected"]["metrics"])
    expected = case["expected"].get("tis_ratio")
    assert (result.weights is None) == (expected is None)
    if expected is not None:
        # SkyRL leaves ratios in masked places, where nothing reads them; here they are zero.
        assert_weights(result, (rows(expected).expand_as(mask) * mask).tolist())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_effective_sample_size_is_of_the_applied_weights(level):
    result = of_fixture(rollout_is=level)
    weights = result.weights[fixture()[2].bool()]
    expected = weights.sum() ** 2 / (len(weights) * weights.square().sum())
    assert_metrics(result, {"rollout_is_eff_sample_size": expected.item()})


@pytest.mark.parametrize("threshold", [1.2, "0.8_1.2"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_todays_figures_are_of_the_applied_weights(level, threshold):
    """Against verl's definitions of 2026-08, written out, on a batch with an empty row."""
    old, rollout, mask = fixture("B")
    result = of_fixture("B", rollout_is=level, rollout_is_threshold=threshold, compatible_metrics="2026-08")
    on, counts = mask.bool(), mask.sum(1)
    low, high = (0.8, 1.2) if isinstance(threshold, str) else (1 / threshold, threshold)
    x = torch.where(on, old - rollout, 0.0)
    sums = x.sum(1)
    raw = torch.where(on, x.exp() if level == "token" else sums.exp()[:, None].expand_as(x), 0.0)
    weights = raw.clamp(max=high)
    if isinstance(threshold, str):
        weights = torch.where((raw < low) | (raw > high), 0.0, raw)
    of_rows, raw_rows = weights.sum(1) / counts.clamp(min=1), raw.sum(1) / counts.clamp(min=1)
    # Extremes of rows are those of the ratios, of which an empty row's is 1.
    extremes, beyond = (weights[on], raw[on]) if level == "token" else (sums.exp(), sums.exp())
    expected = {
        "mean": weights[on].mean(),
        "max": extremes.max(),
        "min": extremes.min(),
        "std": weights[on].std(correction=0),
        "ratio_fraction_high": (beyond > high).double().mean(),
        "ratio_fraction_low": (beyond < low).double().mean(),
        "eff_sample_size": weights[on].mean() ** 2 / weights[on].square().mean(),
        "seq_mean": of_rows.mean(),
        "seq_std": of_rows.std(),
        "seq_max": of_rows.max(),
        "seq_min": of_rows.min(),
        "seq_max_deviation": (of_rows - 1).abs().max(),
        "seq_fraction_high": (raw_rows > high).double().mean(),
        "seq_fraction_low": (raw_rows < low).double().mean(),
    }
    assert_metrics(result, {f"rollout_is_{name}": float(value) for name, value in expected.items()})


@pytest.mark.parametrize(("compatible", "rows_counted"), [(False, 2), (True, 3), ("2026-01", 3), ("2026-08", 3)])
def test_the_veto_counts_all_rows_as_verls_figures(compatible, rows_counted):
    x, mask = [[-12.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[1, 1], [1, 1], [0, 0]]
    veto = {"rollout_is": None, "rollout_token_veto_threshold": 1e-4}
    result = of_log_ratio(x, mask, compatible_metrics=compatible, **veto)
    assert_metrics(result, {"rollout_is_veto_fraction": 1 / rows_counted})


@pytest.mark.parametrize(("x", "extreme"), [(0.5, "rollout_is_min"), (-0.5, "rollout_is_max")])
def test_compatible_extremes_count_empty_rows_with_ratio_one(x, extreme):
    """verl takes the extremes over all rows; the product of no ratios is 1."""
    ratio, mask = torch.full((2, 2), x, dtype=torch.float64), [[1, 1], [0, 0]]
    assert_metrics(of_log_ratio(ratio, mask), {extreme: math.exp(2 * x)})
    compatible = of_log_ratio(ratio, mask, compatible_metrics=True)
    # The empty row's mean weight is 0, and beyond the lower bound.
    assert_metrics(compatible, {extreme: 1, "rollout_is_seq_min": 0})
    assert compatible.metrics["rollout_corr/rollout_is_seq_fraction_low"] >= 0.5


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_band_of_weights_zeroes_what_is_outside(level):
    x = torch.tensor([[0.0, math.log(6), math.log(0.4)], [math.log(2), 0.0, 0.0]], dtype=torch.float64)
    result = of_log_ratio(x, rollout_is=level, rollout_is_threshold="0.5_5.0")
    ratios = x.exp() if level == "token" else x.sum(1, keepdim=True).exp().expand_as(x)
    inside = (ratios >= 0.5) & (ratios <= 5.0)
    torch.testing.assert_close(result.weights, torch.where(inside, ratios, 0.0))
    assert bool(result.mask.all())
    assert_metrics(result, {"rollout_is_oob_ratio": float((~inside).double().mean())})


@pytest.mark.parametrize(
    ("metric", "x"),
    [("product", [30.0, -22.0]), ("product", [-30.0, 31.0]), ("geometric", [9990.0] + [0.0] * 2999)],
    ids=["product high", "product high again", "geometric"],
)
def test_skyrls_rows_are_bounded_whole(metric, x):
    result = of_log_ratio([x, [0.0] * len(x)], skyrl={"sequence_mask_metric": metric, "product_mask_high": 2.0})
    assert result.mask.any(1).tolist() == [False, True]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_that_are_all_tiny_are_not_normalised(level):
    """verl leaves them where their mean is not above 1e-8."""
    x = [[-19.0, -19.0]] if level == "token" else [[-9.5, -9.5]]
    tiny = of_log_ratio(x, rollout_is=level, rollout_is_batch_normalize=True)
    assert_weights(tiny, [[math.exp(-19.0)] * 2], tolerance=0)
    small = of_log_ratio([[-18.0]], rollout_is="token", rollout_is_batch_normalize=True)
    assert_weights(small, [[1.0]])


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"\[B, T\]; given .*rollout_logprobs \[2, 2\]"):
        correct(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2, 3), CorrectionConfig())


ROW_RULES = {
    "mean": {"rollout_is": None, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
    "geometric mean": {"rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
    "product": {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "max": {"rollout_is": None, "rollout_rs": "seq_max_k2", "rollout_rs_threshold": 2.0},
    "skyrl geometric": {"skyrl": {"sequence_mask_metric": "geometric"}},
    "skyrl product": {"skyrl": {"sequence_mask_metric": "product", "tis_ratio_type": "sequence"}},
    "skyrl outlier": {"skyrl": {"outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100.0}},
}
COUNTED = {"skyrl geometric": "geo_sequence_mask_masked_ratio", "skyrl product": "product_sequence_mask_masked_ratio",
           "skyrl outlier": "outlier_seq_masked_ratio"}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "impossible"),
    [
        *((rule, "both") for rule in ROW_RULES),
        ("mean", "old"),
        ("product", "rollout"),
        # k1 of verl's rules, held within 20 on either side, cancels in such a row, as in verl.
        ("max", "one each"),
        ("skyrl product", "one each"),
    ],
)
def test_a_token_of_probability_zero_drops_its_row(rule, impossible):
    old, rollout = torch.full((2, 2, 4), -1.0, dtype=torch.float64)
    if impossible != "rollout":
        old[0, 1] = -math.inf
    if impossible != "old":
        rollout[0, 2 if impossible == "one each" else 1] = -math.inf
    result = correct(old, rollout, torch.ones(2, 4), CorrectionConfig(**ROW_RULES[rule]))
    assert result.mask.any(1).tolist() == [False, True]
    assert_metrics(result, {"seq_masked_fraction": 0.5, COUNTED.get(rule, "rollout_rs_seq_masked_fraction"): 0.5})
    assert all(math.isfinite(value) for value in result.metrics.values())
    if result.weights is not None:
        assert bool(result.weights.isfinite().all())


@pytest.mark.parametrize(
    "fields", [{"rollout_token_veto_threshold": 1e-4}, {"skyrl": {"outlier_token_is_threshold_low": 1e-4}}]
)
def test_the_lower_bound_of_a_token_drops_the_row_that_the_proximal_policy_cannot_sample(fields):
    old = rows([[-1.0, -math.inf, -1.0], [-1.0, -1.0, -1.0]])
    result = correct(old, torch.full_like(old, -1.0), torch.ones(2, 3), CorrectionConfig(rollout_is=None, **fields))
    assert result.mask.any(1).tolist() == [False, True]
    name = "outlier_seq_under_low_ratio" if "skyrl" in fields else "rollout_is_veto_fraction"
    assert_metrics(result, {name: 0.5, "nonfinite_fraction": 1 / 6})


@pytest.mark.parametrize("fields", [{"rollout_is": "token"}, {"skyrl": {"tis_ratio_type": "token"}}])
def test_without_a_rule_for_rows_a_token_of_probability_zero_is_left_out_alone(fields):
    old = rows([[-1.0, -math.inf, -1.0]])
    result = correct(old, torch.full_like(old, -1.0), torch.ones(1, 3), CorrectionConfig(**fields))
    assert result.mask.tolist() == [[True, False, True]]
    assert_weights(result, [[1.0, math.exp(-20.0), 1.0]])


def test_skyrls_ratios_are_bounded_in_its_own_figures():
    x = rows([[30.0, -30.0, 0.0]])
    skyrl = {"skyrl": {"tis_ratio_type": "token"}}
    high, low = math.exp(20.0), math.exp(-20.0)
    expected = {"is_ratio_max": high, "is_ratio_min": low, "is_ratio_mean": (high + low + 1) / 3}
    assert_metrics(of_log_ratio(x, compatible_metrics=True, **skyrl), expected)
    assert_metrics(of_log_ratio(x, **skyrl), {"is_ratio_max": math.exp(30.0)})
