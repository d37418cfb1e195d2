"""Sections of the configuration: sources of data and their answers; what a correction in any spelling comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from common.answers import answer_kind, answer_text, are_mixed, is_missing, normal_answer
from common.config import (
    AlgorithmConfig,
    Config,
    CorrectionConfig,
    SkyRLCorrection,
    Source,
    dump_config,
    load_config,
    parse_config,
)
from common.config.algorithm import loss_options
from common.config.data import KNOWN_SETS
from common.config.losses import SPECS
from common.config.presets import ALIASES, PRESETS, RECOMMENDED
from common.config.section import notes_of
from common.config.warnings import warnings
from tests.support.checks import config_of


def parse(*sources: dict[str, Any], episode: dict[str, Any] | None = None, **data: Any) -> Config:
    train = {"train": list(sources)} if sources else {}
    return config_of(data=train | data, episode=episode or {})


def test_a_string_is_one_source_with_the_sections_settings() -> None:
    config = parse(
        train="data/maths.parquet", heldout=[{"path": "org/set", "split": "validation"}], prompt_column="q",
        id_column="uid", answer_after="####",
        config="hard", system_prompt="be brief",
    )  # fmt: skip
    assert config.data.sources("train") == [
        Source(
            key="data.train", name="maths", path="data/maths.parquet", split="train", config="hard", options={},
            weight=1.0, prompt_column="q", answer_column="answer", id_column="uid", answer_after="####",
            system_prompt="be brief", prompt_markup=False, template_options={}, episode={}, teacher={},
        )
    ]  # fmt: skip
    (heldout,) = config.data.sources("heldout")
    assert (heldout.name, heldout.path, heldout.split) == ("set", "org/set", "validation")
    assert parse({"path": "a.jsonl"}).data.sources("heldout") == []


def test_a_source_has_keys_of_its_own_and_takes_over_the_others() -> None:
    config = parse(
        {"path": "a.jsonl", "weight": 3, "answer_column": "solution", "system_prompt": "", "prompt_markup": True},
        {"path": "org/set", "name": "other", "config": "hard", "split": "all", "episode": {"reward": "math"}},
        heldout="aime24",
        prompt_column="q",
        system_prompt="be brief",
    )
    first, second = config.data.sources("train")
    assert (first.key, first.weight, first.prompt_column, first.answer_column) == ("data.train[a]", 3, "q", "solution")
    assert (first.system_prompt, second.system_prompt) == ("", "be brief")
    assert [config.for_source(source).data.prompt_markup for source in (first, second)] == [True, False]
    assert (second.name, second.split, second.config, second.answer_column) == ("other", "all", "hard", "answer")
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_a_sources_episodes_are_the_runs_with_its_own_keys() -> None:
    options = {"calculator": {}, "code_interpreter": {"timeout": 5}}
    config = parse(
        {"path": "plain.jsonl", "episode": {"tools": ["calculator"], "reward": "math", "user": None}},
        {"path": "same.jsonl"},
        {"path": "asking.jsonl", "episode": {"user": "scripted", "max_response_tokens": 7}, "system_prompt": "ask"},
        {"path": "like-plain.jsonl", "episode": {"tools": ["calculator"], "reward": "math", "user": None}},
        episode={
            "max_assistant_turns": 4,
            "tools": ["calculator", "code_interpreter"],
            "tool_options": options,
            "reward": "format",
            "reward_options": {"format": {"pattern": "x"}},
            "user": "corrector",
            "user_options": {"turns": 2},
        },
    )
    plain, same, asking, _ = (config.for_source(source) for source in config.data.sources("train"))
    assert plain.episode.tools == ["calculator"]
    assert plain.episode.tool_options == {"calculator": {}}, "options of a tool that it does not have are left out"
    assert (plain.episode.reward, plain.episode.reward_options) == ("math", {})
    assert (plain.episode.user, plain.episode.user_options) == (None, {})
    assert same == config
    assert (asking.episode.user, asking.episode.user_options) == ("scripted", {})
    assert (asking.episode.max_response_tokens, asking.episode.tool_options) == (7, options)
    assert asking.data.system_prompt == "ask"
    in_use = {"data.train[plain].episode": plain, "episode": same, "data.train[asking].episode": asking}
    assert config.episodes_in_use() == {key: one.episode for key, one in in_use.items()}


def test_a_key_of_one_source_can_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {train: [{path: a.jsonl}, {path: b.jsonl, name: hard}]}\n")
    overrides = ["data.train.hard.weight=2", "data.train.0.episode.reward=math"]
    first, hard = load_config(path, overrides, {}).data.sources("train")
    assert (hard.weight, first.episode) == (2, {"reward": "math"})


def test_sets_known_by_name_have_columns_split_and_configuration() -> None:
    config = parse({"path": "gsm8k"}, {"path": "beyondaime"}, heldout=[{"path": "gsm8k"}, {"path": "aime25"}])
    gsm8k, beyond = config.data.sources("train")
    assert (gsm8k.path, gsm8k.config, gsm8k.split) == ("openai/gsm8k", "main", "train")
    assert (gsm8k.prompt_column, gsm8k.answer_after, beyond.split) == ("question", "####", "test")
    assert [source.split for source in config.data.sources("heldout")] == ["test", "train"]
    (own,) = parse({"path": "gsm8k", "config": "socratic", "split": "test"}).data.sources("train")
    assert (own.config, own.split, own.answer_after) == ("socratic", "test", "####")


@pytest.mark.parametrize("name", KNOWN_SETS)
def test_a_local_copy_is_read_by_the_format_of_a_known_set(name: str) -> None:
    (known,) = parse({"path": name}).data.sources("train")
    (copy,) = parse({"path": "copy.parquet", "format": name}, id_column="uid").data.sources("train")
    assert copy.path == "copy.parquet"
    for key in ("prompt_column", "answer_column", "answer_after", "id_column"):
        assert getattr(copy, key) == getattr(known, key)


def test_rewards_that_compare_nothing_need_no_answers() -> None:
    judged = {"template": "Is it kind? {text}", "base_url": "http://x", "model": "m"}
    for episode in (
        {"reward": {"format": 0.5, "module:mine": 0.5}},
        {"reward": "code", "reward_options": {"code": {"tests": "cases"}}},
        {"reward": "judge", "reward_options": {"judge": judged}},
    ):
        (source,) = parse(train="t", answer_column=None, episode=episode).data.sources("train")
        assert source.answer_column is None


@pytest.mark.parametrize(
    ("train", "paths", "name"),
    [
        ("maths/*.parquet", "maths/*.parquet", "maths"),
        (["data/a.jsonl", "b.jsonl"], ("data/a.jsonl", "b.jsonl"), "a"),
        ([{"path": ["a.jsonl", "b.jsonl"], "name": "both"}], ("a.jsonl", "b.jsonl"), "both"),
    ],
)
def test_several_files_are_one_source(train: Any, paths: Any, name: str) -> None:
    (source,) = parse(train=train).data.sources("train")
    assert (source.path, source.name) == (paths, name)


def test_template_options_of_a_source_replace_the_sections() -> None:
    config = parse({"path": "a.jsonl"}, {"path": "b.jsonl", "template_options": {}}, template_options={"x": False})
    assert [config.for_source(one).data.template_options for one in config.data.sources("train")] == [{"x": False}, {}]


def test_numbers_and_booleans_are_text_whatever_their_type() -> None:
    for answer in (79, "79", 79.0, np.int64(79), np.int8(79), np.float32(79), np.float64(79.0)):
        assert normal_answer(answer) == "79"
    texts: list[tuple[Any, str]] = [
        (-3, "-3"), (-0.0, "0"), (0.5, "0.5"), (-2.25, "-2.25"), (1e-05, "0.00001"),
        (1e22, "10000000000000000000000"), (2**70, "1180591620717411303424"), (float("inf"), "inf"),
        (True, "True"), (np.False_, "False"), ("79.0", "79.0"), (" 79 ", " 79 "),
    ]  # fmt: skip
    for answer, text in texts:
        assert normal_answer(answer) == answer_text(answer) == text


def test_lists_and_mappings_are_compared_as_json() -> None:
    for answer in ([1, "a"], {"inputs": ["1"], "outputs": ["2"]}):
        assert normal_answer(answer) is answer
    assert answer_text([1, "é", None]) == '[1, "é", null]'
    assert answer_text({"a": [2.0]}) == '{"a": [2.0]}'


def test_what_is_blank_is_no_answer_and_zero_and_false_are() -> None:
    assert all(map(is_missing, (None, "", "  ", float("nan"), np.float64("nan"), [], {})))
    assert not any(map(is_missing, (0, 0.0, False, "0", [0], {"a": None})))


def test_types_that_no_reward_compares_alike_are_mixed() -> None:
    kinds = [answer_kind(answer) for answer in (1, 2.5, np.int64(3), "4", True, [5], {"a": 6})]
    assert kinds == ["number", "number", "number", "text", "boolean", "list", "mapping"]
    assert not are_mixed({"number", "text"})
    assert are_mixed({"number", "boolean"})
    assert are_mixed({"text", "list"})


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
    (MEAN | {"rollout_rs_threshold": 1.001, "rollout_rs_threshold_lower": 0.999},
     MEAN | {"rollout_rs_threshold": "0.999_1.001"}),
    (SEQUENCE | {"use_pure_rollout_correction": True}, SEQUENCE | {"bypass_mode": True, "loss_type": "reinforce"}),
    (OFF | {"bypass_mode": False, "loss_type": "ppo_clip"}, OFF),
    (TOKEN | BANDS | {"rollout_is_mode": "clip"}, TOKEN | {"rollout_is_threshold": "0.5_5"}),
    ({"rollout_is": True, "rollout_is_level": "sequence", "rollout_is_mode": "mask"},
     SEQUENCE | {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}),
    (TOKEN | {"rollout_is_veto_threshold": 1e-4}, TOKEN | {"rollout_token_veto_threshold": 1e-4}),
    ({"use_tis": True, "tis_imp_ratio_cap": 3.0}, CAPPED),
    ({"rollout_is_threshold": None}, OFF),
    ({"rollout_is_threshold": None} | MASKED, OFF | MASKED),
]  # fmt: skip


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
    assert len(lines) == len([*notes_of(config.algorithm.correction)]) > 0
    assert all("; say " in line for line in lines)


@pytest.mark.parametrize("text", ["correction: null", "rollout_correction: null"])
def test_no_correction_means_none_and_not_the_default(text: str) -> None:
    chosen = config_of(algorithm=yaml.safe_load(text)).algorithm
    assert chosen == algorithm({"preset": "disabled"})
    assert (chosen.correction.weight, chosen.correction.masks, chosen.proximal) == (None, [], "recompute")


# Calls of verl's functions, and the fields that these give (verl/trainer/config/algorithm.py).
CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("bypass_pg_token_icepop", {"threshold_lower": 0.25}, {"rollout_is_threshold": "0.25_5.0"}),
    ("decoupled_seq_is_rs", {"is_threshold": 3.0, "rs_threshold": "0.4_2.5"},
     {"rollout_is_threshold": 3.0, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.4_2.5"}),
    ("geo_rs", {"rs_threshold": 1.01, "rs_threshold_lower": 0.98, "veto_threshold": 1e-4},
     {"rollout_rs_threshold": "0.98_1.01", "rollout_token_veto_threshold": 1e-4}),
]  # fmt: skip


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
