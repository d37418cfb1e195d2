"""`data.train` and `data.heldout` as lists: what a source has of its own, and what it takes over; reference answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from common.answers import answer_kind, answer_text, are_mixed, is_missing, normal_answer
from common.config import Config, Source, dump_config, load_config, parse_config
from common.config.data import KNOWN_SETS
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
