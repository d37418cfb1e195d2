"""How a correction is chosen: presets, verl's fields, SkyRL's block, and what each mistake is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import AlgorithmConfig, CorrectionConfig, dump_config, load_config, parse_config
from common.config.correction import REJECTION_MODES
from common.config.load import ConfigLoader
from common.config.presets import ALIASES, PRESETS, RECOMMENDED
from common.errors import UserError

BASE = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}
FILE = "model: {path: m}\ndata: {train: t.jsonl}\n"

SPELLINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "one knob": {"rollout_is_threshold": 3.0},
    "verl": {"rollout_rs": "token_k1, seq_max_k2", "rollout_rs_threshold": "0.5_2,1.5", "verl_compatible_k1": True},
    "veto": {"rollout_is": None, "rollout_token_veto_threshold": 1e-4, "compatible_metrics": True},
    "normalised": {"rollout_is": "token", "rollout_is_batch_normalize": True},
    "untruncated": {"rollout_is_threshold": float("inf")},
    "by age": {"thresholds_by_age": [1, 0.9, 0.8, 0.5, 0.25]},
    "bypass": {"bypass_mode": True, "loss_type": "reinforce"},
    "skyrl": {"skyrl": {"tis_ratio_type": "sequence", "sequence_mask_metric": "geometric", "geo_mask_high": 1.5}},
    "skyrl, nothing chosen": {"skyrl": {}},
    "skyrl in bypass": {"skyrl": {"tis_ratio_type": "token"}, "bypass_mode": True},
}


def algorithm(correction: dict[str, Any] | None = None, **others: Any) -> AlgorithmConfig:
    section = others if correction is None else others | {"correction": correction}
    return parse_config(BASE | {"algorithm": section}).algorithm


def refusal(correction: dict[str, Any], **others: Any) -> str:
    with pytest.raises(UserError) as caught:
        algorithm(correction, **others)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def read(folder: Path, text: str, *overrides: str) -> AlgorithmConfig:
    path = folder / "run.yaml"
    path.write_text(FILE + text, encoding="utf-8")
    return load_config(path, overrides, {}).algorithm


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_fields_and_leaves_the_rest_as_verl_has_it(name):
    chosen = algorithm({"preset": name}).correction
    plain, fields = CorrectionConfig(), PRESETS[name].fields
    assert chosen.preset_name == name
    for field in set(CorrectionConfig.model_fields) - {"preset_name"}:
        assert getattr(chosen, field) == fields.get(field, getattr(plain, field)), field


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_the_preset_itself(alias, name):
    assert algorithm({"preset": alias}) == algorithm({"preset": name})


def test_the_older_names_are_known():
    older = "token_is seq_is seq_is_rs geo_rs ppo_is_bypass pure_is pg_is pg_rs token_tis seq_mis geo_mis"
    assert set(older.split()) == set(ALIASES)


def test_fields_given_beside_a_preset_win():
    chosen = algorithm({"preset": "decoupled_k3_rs", "rollout_rs_threshold": 0.5, "rollout_is": "token"}).correction
    assert (chosen.rollout_rs, chosen.rollout_rs_threshold, chosen.rollout_is) == ("seq_mean_k3", 0.5, "token")
    off = algorithm({"preset": "decoupled_seq_is_rs", "rollout_rs": None, "rollout_rs_threshold": None}).correction
    assert (off.rollout_is, off.masks) == ("sequence", [])
    anchored = algorithm({"preset": "bypass_pg_is", "bypass_mode": False})
    assert (anchored.proximal, anchored.loss) == ("recompute", "ppo_clip")


@pytest.mark.parametrize("correction", [None, {}])
def test_without_a_choice_the_recommended_preset_is_taken(correction):
    assert algorithm(correction).correction == CorrectionConfig.preset(RECOMMENDED)
    assert AlgorithmConfig().correction == CorrectionConfig.preset(RECOMMENDED)


@pytest.mark.parametrize(
    "knob",
    [
        {"rollout_is_threshold": 5.0},
        {"rollout_is_batch_normalize": True},
        {"thresholds_by_age": [1.0, 1.0, 1.0, 0.5, 0.5]},
        {"compatible_metrics": True},
        {"verl_compatible_k1": True},
    ],
)
def test_a_knob_alone_adjusts_the_recommended_preset(knob):
    assert algorithm(knob).correction == CorrectionConfig.preset(RECOMMENDED, **knob)


@pytest.mark.parametrize(
    "choice", [{"rollout_rs": "token_k2", "rollout_rs_threshold": 1}, {"rollout_token_veto_threshold": 1e-4}]
)
def test_a_choice_of_ones_own_begins_from_verls_defaults(choice):
    chosen = algorithm(choice).correction
    assert (chosen.preset_name, chosen.rollout_is, chosen.rollout_is_threshold) == (None, "sequence", 2.0)


def test_skyrls_block_switches_verls_default_weights_off():
    chosen = algorithm({"skyrl": {"tis_ratio_type": "token"}}).correction
    assert (chosen.rollout_is, chosen.preset_name) == (None, None)


def test_bypass_mode_is_the_generating_policy_as_proximal_one():
    assert algorithm({"bypass_mode": True}).proximal == "rollout"
    assert algorithm({"bypass_mode": False}).proximal == "recompute"
    assert algorithm({"preset": "bypass_ppo_clip_k3_rs"}).proximal == "rollout"


def test_loss_type_names_the_loss_in_bypass_mode_only():
    assert algorithm({"bypass_mode": True, "loss_type": "reinforce"}).loss == "reinforce"
    assert algorithm({"bypass_mode": True, "loss_type": "ppo_clip"}).loss == "ppo_clip"
    assert algorithm({"loss_type": "reinforce"}).loss == "ppo_clip"


def test_what_a_preset_implies_gives_way_to_what_is_said():
    assert (algorithm({"preset": "sao"}).loss, algorithm({"preset": "sao"}).proximal) == ("double_sided", "rollout")
    assert algorithm({"preset": "sao"}, loss="cispo").loss == "cispo"
    assert algorithm({"preset": "vcpo"}).ess_lr == "sqrt"
    assert algorithm({"preset": "vcpo"}, ess_lr="none").ess_lr == "none"


@pytest.mark.parametrize(
    ("correction", "others", "message"),
    [
        ({"bypass_mode": True}, {"proximal": "recompute"}, "proximal = 'recompute' contradicts correction.bypass_mode"),
        ({"preset": "sao"}, {"proximal": "interpolate"}, "proximal = 'interpolate' contradicts"),
        ({"preset": "bypass_pg_is"}, {"loss": "gspo"}, "loss = 'gspo' contradicts correction.loss_type = 'reinforce'"),
        ({"skyrl": {}, "rollout_is": "token"}, {}, "give one of the two"),
        ({"skyrl": {}, "rollout_rs": "token_k2", "rollout_rs_threshold": 1}, {}, "give one of the two"),
        ({"skyrl": {}, "rollout_token_veto_threshold": 1e-4}, {}, "give one of the two"),
        ({"preset": "decoupled_token_is", "skyrl": {"tis_ratio_type": "token"}}, {}, "give one of the two"),
        ({"rollout_is": None, "rollout_is_batch_normalize": True}, {}, "rollout_is_batch_normalize = true has no"),
        ({"skyrl": {"tis_ratio_type": "token"}, "rollout_is_batch_normalize": True}, {}, "rollout_is is null"),
        (
            {"rollout_is": None, "rollout_rs_threshold": 2},
            {},
            "rollout_rs_threshold = 2.0 bounds nothing while rollout_rs is null",
        ),
        ({"preset": "decoupled_geo_rs", "rollout_rs": None}, {}, "bounds nothing while rollout_rs is null"),
    ],
)
def test_contradictions_are_refused_with_the_way_out(correction, others, message):
    assert message in refusal(correction, **others)


def test_generating_policy_as_proximal_one_without_verls_word_is_no_contradiction():
    chosen = algorithm({"preset": "decoupled_token_is"}, proximal="rollout")
    assert not chosen.correction.bypass_mode
    assert not chosen.weighs_loss


@pytest.mark.parametrize(
    ("proximal", "loss", "weighs"),
    [
        ("recompute", "ppo_clip", True),
        ("interpolate", "gspo", True),
        ("compare", "double_sided", True),
        ("rollout", "reinforce", True),
        ("rollout", "ppo_clip", False),
        ("rollout", "double_sided", False),
    ],
)
def test_weights_multiply_the_loss_unless_its_ratio_is_the_weight_already(proximal, loss, weighs):
    assert AlgorithmConfig(proximal=proximal, loss=loss).weighs_loss is weighs


@pytest.mark.parametrize(
    "correction", [*({"preset": name} for name in (*PRESETS, *ALIASES)), *SPELLINGS.values()], ids=str
)
def test_the_resolved_configuration_reads_back_the_same(tmp_path, correction):
    config = parse_config(BASE | {"run": {"modules": str(tmp_path)}, "algorithm": {"correction": correction}})
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path, (), {}) == config


@pytest.mark.parametrize("correction", SPELLINGS.values(), ids=[*SPELLINGS])
def test_a_correction_made_in_python_is_the_one_that_was_made(correction):
    made = CorrectionConfig(**correction)
    assert AlgorithmConfig(correction=made).correction == made


ERRORS = [
    # What was given, and what the one line must say: field, value, what is allowed.
    ({"rollout_is": "row"}, ["correction.rollout_is = 'row'", "'token' or 'sequence'"]),
    ({"rollout_is_threshold": 0}, ["rollout_is_threshold = 0", "above 0"]),
    ({"rollout_is_threshold": -1.5}, ["rollout_is_threshold = -1.5", "above 0"]),
    ({"rollout_is_threshold": float("nan")}, ["rollout_is_threshold = nan", "above 0"]),
    ({"rollout_is_threshold": "two"}, ["rollout_is_threshold = 'two'", "not a number"]),
    (
        {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2},
        ["rollout_rs = 'seq_max_k1'", "'seq_max_k1' is no mode", *REJECTION_MODES],
    ),
    ({"rollout_is_threshold": "5_0.5"}, ["rollout_is_threshold = '5_0.5'", "lower 5 is above upper 0.5"]),
    ({"rollout_rs": ",", "rollout_rs_threshold": 2}, ["rollout_rs = ','", "names no mode", "token_k1"]),
    ({"rollout_rs": "token_k1"}, ["rollout_rs = 'token_k1' needs rollout_rs_threshold", "null"]),
    (
        {"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "2,3"},
        ["rollout_rs_threshold = '2,3' has 2 parts for 3 modes", "one for all, or one each"],
    ),
    (
        {"rollout_rs": "token_k2", "rollout_rs_threshold": "1,2"},
        ["rollout_rs_threshold = '1,2' has 2 parts for 1 modes"],
    ),
    (
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "a_b"},
        ["rollout_rs_threshold = 'a_b'", "'a'", "not a number"],
    ),
    (
        {"rollout_rs": "token_k1", "rollout_rs_threshold": ""},
        ["rollout_rs_threshold = ''", "give a number, or lower_upper"],
    ),
    ({"rollout_rs": "token_k3", "rollout_rs_threshold": 0}, ["rollout_rs_threshold = 0.0", "above 0"]),
    ({"rollout_rs": "token_k1", "rollout_rs_threshold": "-0.5_2"}, ["'-0.5_2'", "'-0.5'", "above 0"]),
    ({"rollout_rs": "token_k2", "rollout_rs_threshold": "nan"}, ["'nan'", "number above 0"]),
    ({"rollout_rs": "token_k2", "rollout_rs_threshold": "inf"}, ["'inf'", "number above 0"]),
    ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, ["'0.5_2'", "token_k2 takes an upper bound alone"]),
    ({"rollout_rs": "seq_max_k3", "rollout_rs_threshold": "1_2"}, ["'1_2'", "seq_max_k3 takes an upper bound alone"]),
    ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2_0.5"}, ["'2_0.5'", "lower 2 is above upper 0.5"]),
    ({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 0.5}, ["= 0.5", "lower 2 is above upper 0.5"]),
    ({"rollout_rs": "token_k1", "rollout_rs_threshold": "1_2_3"}, ["'1_2_3'", "not lower_upper"]),
    ({"rollout_rs": "token_k1", "rollout_rs_threshold": [0.5, 2]}, ["rollout_rs_threshold", "[0.5, 2]"]),
    ({"rollout_token_veto_threshold": 0}, ["rollout_token_veto_threshold = 0", "greater than 0"]),
    ({"bypass_mode": "sideways"}, ["correction.bypass_mode = 'sideways'", "boolean"]),
    ({"loss_type": "gspo"}, ["correction.loss_type = 'gspo'", "'ppo_clip' or 'reinforce'"]),
    ({"thresholds_by_age": [1, 1]}, ["thresholds_by_age = [1, 1]", "5 items"]),
    ({"thresholds_by_age": [1, 1, 1, 1, 0]}, ["thresholds_by_age = [1.0, 1.0, 1.0, 1.0, 0.0]", "above 0"]),
    ({"thresholds_by_age": [1, 1, 1, 1, float("inf")]}, ["thresholds_by_age", "inf]", "numbers above 0"]),
    ({"thresholds_by_age": [1, 1, 1, 1, float("nan")]}, ["thresholds_by_age", "nan]", "numbers above 0"]),
    ({"skyrl": {"tis_ratio_type": "row"}}, ["correction.skyrl.tis_ratio_type = 'row'", "'token' or 'sequence'"]),
    ({"skyrl": {"sequence_mask_metric": "sum"}}, ["skyrl.sequence_mask_metric = 'sum'", "'product' or 'geometric'"]),
    ({"skyrl": {"token_tis_ratio_clip_high": 0}}, ["skyrl.token_tis_ratio_clip_high = 0", "greater than 0"]),
    ({"skyrl": {"geo_mask_low": 2}}, ["skyrl", "geo_mask_low = 2.0 is above geo_mask_high = 1.01"]),
    ({"skyrl": {"product_mask_high": 0.1}}, ["product_mask_low = 0.5 is above product_mask_high = 0.1"]),
    (
        {"skyrl": {"outlier_token_is_threshold_low": 5, "outlier_token_is_threshold_high": 1}},
        ["outlier_token_is_threshold_low = 5.0 is above outlier_token_is_threshold_high = 1.0"],
    ),
    ({"preset": 3}, ["correction.preset = 3", "string"]),
]


@pytest.mark.parametrize(("correction", "parts"), ERRORS, ids=[str(correction) for correction, _ in ERRORS])
def test_a_mistake_is_one_line_that_names_field_value_and_what_is_allowed(correction, parts):
    message = refusal(correction)
    assert message.startswith("configuration key algorithm.correction")
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({"preset": "decoupled_token_iss"}, "preset 'decoupled_token_iss' is unknown; did you mean decoupled_token_is"),
        ({"preset": "geo"}, "did you mean geo_rs"),
        ({"preset": "zzzz"}, f"preset 'zzzz' is unknown; allowed: {', '.join(PRESETS)}"),
        (
            {"rollout_iss": "token"},
            "key algorithm.correction.rollout_iss; did you mean algorithm.correction.rollout_is?",
        ),
        ({"prest": "geo_rs"}, "did you mean algorithm.correction.preset?"),
        ({"preset_name": "geo_rs"}, "did you mean algorithm.correction.preset?"),
        (
            {"skyrl": {"geo_mask_lo": 1}},
            "correction.skyrl.geo_mask_lo; did you mean algorithm.correction.skyrl.geo_mask",
        ),
        ({"skyrl": {"xxxx": 1}}, "key algorithm.correction.skyrl.xxxx; allowed: tis_ratio_type, token_tis_ratio"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(correction, message):
    assert message in refusal(correction)


@pytest.mark.parametrize("section", ["decoupled", 3, ["token"]])
def test_a_correction_that_is_no_section_is_refused(section):
    with pytest.raises(UserError, match=r"algorithm\.correction = .* is a section"):
        algorithm(section)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5_2", "0.5_2"),
        ("0.5_2.0", "0.5_2.0"),
        ("1_2", "1_2"),
        ("0.999_1.001", "0.999_1.001"),
        ("1_000_000", 1_000_000),
        ("12_000", 12_000),
        ("100", 100),
        ("-3", -3),
        ("0", 0),
        ("0.5", 0.5),
        (".5", 0.5),
        ("1e-6", 1e-6),
        ("1.0e-6", 1e-6),
        (".inf", float("inf")),
        ("0x1f", 31),
        ("08", "08"),
        ("019", "019"),
        ("1:30", "1:30"),
        ("true", True),
        ("~", None),
    ],
)
def test_yaml_reads_bands_as_text_and_numbers_as_numbers(text, value):
    parsed = yaml.load(text, ConfigLoader)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("band", ["0.5_2", "'0.5_2'", "0.5_2.0"])
def test_a_band_needs_no_quotes_in_the_file_and_on_the_command_line(tmp_path, band):
    wanted = CorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.5_2").masks
    written = f"algorithm: {{correction: {{rollout_rs: token_k1, rollout_rs_threshold: {band}}}}}\n"
    assert read(tmp_path, written).correction.masks == wanted
    overrides = ("algorithm.correction.rollout_rs=token_k1", f"algorithm.correction.rollout_rs_threshold={band}")
    assert read(tmp_path, "", *overrides).correction.masks == wanted


def test_trailing_commas_and_thresholds_as_text_are_read_as_verl_reads_them():
    plain = CorrectionConfig(rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.5_2,0.1")
    commas = CorrectionConfig(rollout_rs="token_k1, seq_mean_k3,", rollout_rs_threshold="0.5_2, 0.1,")
    assert commas.masks == plain.masks
    assert CorrectionConfig(rollout_is_threshold="3.0").weight == CorrectionConfig(rollout_is_threshold=3).weight


def test_a_band_of_weights_is_icepop():
    weight = CorrectionConfig.preset("decoupled_token_icepop").weight
    assert (weight.level, weight.lower, weight.upper, weight.zero_outside) == ("token", 0.5, 5.0, True)
    bypass = algorithm({"preset": "bypass_pg_token_icepop"})
    assert (bypass.proximal, bypass.loss, bypass.correction.weight) == ("rollout", "reinforce", weight)


def test_numbers_of_the_file_keep_their_thousands(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(FILE + "run: {steps: 1_000_000}\n", encoding="utf-8")
    assert load_config(path, (), {}).run.steps == 1_000_000
