"""What presets, verl's fields, SkyRL's block and their former names come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import AlgorithmConfig, CorrectionConfig, SkyRLCorrection, dump_config, load_config
from common.config.algorithm import loss_options
from common.config.losses import SPECS
from common.config.presets import ALIASES, PRESETS, RECOMMENDED
from common.config.warnings import warnings
from tests.support.checks import config_of

SPELLINGS: list[dict[str, Any]] = [
    {},
    {"rollout_is_threshold": 3.0},
    {"rollout_is": None, "rollout_token_veto_threshold": 1e-4, "compatible_metrics": True},
    {"rollout_is": "token", "rollout_is_batch_normalize": True},
    {"thresholds_by_age": [1, 0.9, 0.8, 0.5, 0.25]},
    {"skyrl": {"tis_ratio_type": "sequence", "sequence_mask_metric": "geometric", "geo_mask_high": 1.5}},
]
CAPPED = {"skyrl": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 3.0}}
TOKEN, SEQUENCE, OFF = {"rollout_is": "token"}, {"rollout_is": "sequence"}, {"rollout_is": None}
MASKED = {"rollout_rs": "token_k2", "rollout_rs_threshold": 1}
MEAN = {"rollout_rs": "seq_mean_k1"}
BANDS = {"rollout_is_threshold": 5, "rollout_is_threshold_lower": 0.5}
# Fields under former names, and the same under today's.
FORMER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rollout_is_level": "token"}, TOKEN),
    ({"rollout_is": False, "rollout_is_level": "token"}, OFF),
    (
        MEAN | {"rollout_rs_threshold": 1.001, "rollout_rs_threshold_lower": 0.999},
        MEAN | {"rollout_rs_threshold": "0.999_1.001"},
    ),
    (SEQUENCE | {"use_pure_rollout_correction": True}, SEQUENCE | {"bypass_mode": True, "loss_type": "reinforce"}),
    (OFF | {"bypass_mode": False, "loss_type": "ppo_clip"}, OFF),
    (TOKEN | BANDS | {"rollout_is_mode": "clip"}, TOKEN | {"rollout_is_threshold": "0.5_5"}),
    (
        {"rollout_is": True, "rollout_is_level": "sequence", "rollout_is_mode": "mask"},
        SEQUENCE | {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    ),
    (TOKEN | {"rollout_is_veto_threshold": 1e-4}, TOKEN | {"rollout_token_veto_threshold": 1e-4}),
    ({"use_tis": True, "tis_imp_ratio_cap": 3.0}, CAPPED),
    ({"rollout_is_threshold": None}, OFF),
    ({"rollout_is_threshold": None} | MASKED, OFF | MASKED),
]


def algorithm(correction: dict[str, Any] | None = None, **others: Any) -> AlgorithmConfig:
    section = others if correction is None else others | {"correction": correction}
    return config_of(algorithm=section).algorithm


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_fields_and_leaves_verls_defaults(name: str) -> None:
    chosen, plain = algorithm({"preset": name}).correction, CorrectionConfig()
    expected = {field: getattr(plain, field) for field in CorrectionConfig.model_fields} | PRESETS[name].fields
    assert {field: getattr(chosen, field) for field in expected} == expected | {"preset_name": name}


def test_former_names_of_presets_are_the_presets() -> None:
    former = (
        "token_is seq_is seq_is_rs geo_rs ppo_is_bypass pure_is pg_is pg_rs token_tis seq_mis geo_mis bypass_pg_rs "
        "geo_rs_seq_tis pg_geo_rs_seq_tis sao"
    )
    assert set(former.split()) == set(ALIASES)
    for alias, name in ALIASES.items():
        assert algorithm({"preset": alias}) == algorithm({"preset": name})


@pytest.mark.parametrize(("former", "today"), FORMER, ids=str)
def test_former_names_are_read_with_a_warning(former: dict[str, Any], today: dict[str, Any]) -> None:
    config = config_of(algorithm={"correction": former})
    expected = algorithm(today)
    assert config.algorithm.correction.model_dump() == expected.correction.model_dump()
    assert (config.algorithm.loss, config.algorithm.proximal) == (expected.loss, expected.proximal)
    lines = [line for line in warnings(config) if "older" in line]
    assert len(lines) == len(config.algorithm.correction.notes) > 0
    assert all("; say " in line for line in lines)


@pytest.mark.parametrize("text", ["correction: null", "rollout_correction: null"])
def test_no_correction_means_none_and_not_the_default(text: str) -> None:
    chosen = config_of(algorithm=yaml.safe_load(text)).algorithm
    assert chosen == algorithm({"preset": "disabled"})
    assert (chosen.correction.weight, chosen.correction.masks, chosen.proximal) == (None, [], "recompute")


# Calls of verl's functions, and the fields that these give (verl/trainer/config/algorithm.py).
CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("bypass_pg_token_icepop", {"threshold_lower": 0.25}, {"rollout_is_threshold": "0.25_5.0"}),
    (
        "decoupled_seq_is_rs",
        {"is_threshold": 3.0, "rs_threshold": "0.4_2.5"},
        {"rollout_is_threshold": 3.0, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.4_2.5"},
    ),
    (
        "geo_rs",
        {"rs_threshold": 1.01, "rs_threshold_lower": 0.98, "veto_threshold": 1e-4},
        {"rollout_rs_threshold": "0.98_1.01", "rollout_token_veto_threshold": 1e-4},
    ),
]


@pytest.mark.parametrize(("name", "given", "fields"), CALLS)
def test_presets_take_arguments_of_verls_functions(name: str, given: dict[str, Any], fields: dict[str, Any]) -> None:
    made = CorrectionConfig.preset(name, **given)
    assert {field: getattr(made, field) for field in fields} == fields


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("decoupled_geo_rs", {"threshold": 2.0}, "threshold = 2.0 bounds nothing in preset 'decoupled_geo_rs'"),
        ("decoupled_token_is", {"threshold_lower": 0.5}, "threshold_lower"),
        ("decoupled_token_is", {"threshold": 2.0, "rollout_is_threshold": 3.0}, "give one of the two"),
    ],
)
def test_arguments_that_a_preset_cannot_use_are_refused(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CorrectionConfig.preset(name, **arguments)


# verl's YAML has no weights, though its class has: what is pasted means what it meant there.
VERLS = {"preset_name": None, "rollout_is": None, "rollout_is_threshold": 2.0}
# The correction's fields, and what they come to: fields beside a preset win, others begin from verl's defaults.
CHOSEN: dict[str, dict[str, Any]] = {
    "{preset: decoupled_k3_rs, rollout_rs_threshold: 0.5, rollout_is: token}": {
        "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.5, "rollout_is": "token",
    },
    "{preset: decoupled_seq_is_rs, rollout_rs: null, rollout_rs_threshold: null}": {
        "rollout_is": "sequence", "masks": [],
    },
    "{rollout_rs: token_k2, rollout_rs_threshold: 1}": VERLS,
    "{m2_threshold: 0.04}": {**VERLS, "masks": []},
    "{skyrl: {tis_ratio_type: token}}": {"preset_name": None, "rollout_is": None},
    "{skyrl: {geo_mask_low: 0, product_mask_low: 0}}": {"masks": []},
}  # fmt: skip
# The algorithm's fields; proximal policy, loss and scaling of the learning rate that follow.
IMPLIED = {
    "correction: {bypass_mode: true}": "rollout ppo_clip none",
    "correction: {bypass_mode: true, loss_type: reinforce}": "rollout reinforce none",
    "correction: {loss_type: reinforce}": "recompute ppo_clip none",
    "correction: {preset: bypass_pg_token_icepop}": "rollout reinforce none",
    "{correction: {preset: sao_mask}, loss: cispo}": "rollout cispo none",
    "correction: {preset: vcpo}": "rollout reinforce sqrt",
    "{correction: {preset: vcpo}, ess_lr: none}": "rollout reinforce none",
}


@pytest.mark.parametrize("fields", CHOSEN)
def test_what_is_named_wins_over_what_is_implied(fields: str) -> None:
    chosen = algorithm(yaml.safe_load(fields)).correction
    assert {field: getattr(chosen, field) for field in CHOSEN[fields]} == CHOSEN[fields]


def test_a_knob_alone_adjusts_the_recommended_preset() -> None:
    knobs: list[dict[str, Any]] = [{}, {"rollout_is_threshold": 5.0}, {"compatible_metrics": True}]
    for knob in knobs:
        assert algorithm(knob).correction == CorrectionConfig.preset(RECOMMENDED, **knob)
    assert AlgorithmConfig().correction == algorithm().correction == CorrectionConfig.preset(RECOMMENDED)


@pytest.mark.parametrize("fields", IMPLIED)
def test_a_correction_implies_proximal_policy_and_loss(fields: str) -> None:
    chosen = algorithm(**yaml.safe_load(fields))
    assert [chosen.proximal, chosen.loss, chosen.ess_lr] == IMPLIED[fields].split()


@pytest.mark.parametrize("proximal", ["recompute", "interpolate", "compare", "rollout"])
def test_weights_multiply_the_loss_unless_its_ratio_is_one(proximal: Any) -> None:
    for loss in SPECS:
        options = {"beta": 1.0} if loss == "dro" else {}
        chosen = algorithm({"preset": "decoupled_token_is"}, proximal=proximal, loss=loss, loss_options=options)
        assert chosen.weighs_loss == (proximal != "rollout" or loss in ("reinforce", "gpg", "dro"))


@pytest.mark.parametrize("correction", [*({"preset": name} for name in [*PRESETS][::4]), *SPELLINGS], ids=str)
def test_a_resolved_correction_reads_back_the_same(tmp_path: Path, correction: dict[str, Any]) -> None:
    config = config_of(run={"modules": str(tmp_path)}, algorithm={"correction": correction})
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path, (), {}) == config
    made = CorrectionConfig(**correction)
    assert AlgorithmConfig(correction=made).correction == made


def test_options_that_are_not_given_have_defaults() -> None:
    chosen = algorithm(loss="cispo", loss_options={"low": 0.3})
    assert loss_options("cispo", chosen) == {"low": 0.3, "high": 0.28}
    assert loss_options("ppo_clip", algorithm(loss_options={"low": 0.1})) == {"low": 0.1, "high": 0.28, "cap": 10.0}
    assert loss_options("vespo", algorithm(loss="vespo", loss_options={"k_neg": 1})) == {
        "k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 1.0, "lambda_neg": 2.0,
    }  # fmt: skip


def test_thresholds_are_read_as_verl_reads_them() -> None:
    plain = CorrectionConfig(rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.5_2,0.1")
    twice = CorrectionConfig(rollout_rs="token_k1,seq_mean_k3,token_k1", rollout_rs_threshold="0.5_2,0.1")
    assert twice.masks == [*plain.masks, plain.masks[0]]
    commas = CorrectionConfig(rollout_rs="token_k1, seq_mean_k3,", rollout_rs_threshold="0.5_2, 0.1,")
    assert commas.masks == plain.masks
    assert CorrectionConfig(rollout_is_threshold="3.0").weight == CorrectionConfig(rollout_is_threshold=3).weight
    weight = CorrectionConfig.preset("decoupled_token_icepop").weight  # a band of weights
    assert weight is not None
    assert (weight.level, weight.lower, weight.upper, weight.zero_outside) == ("token", 0.5, 5.0, True)


def test_skyrls_former_names_stand_beside_its_block() -> None:
    assert algorithm(use_tis=True, tis_imp_ratio_cap=3.0).correction.skyrl == SkyRLCorrection(**CAPPED["skyrl"])
