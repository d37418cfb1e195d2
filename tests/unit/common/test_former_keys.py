"""Keys of earlier releases: moved with a warning, ignored at their former default, and refused at another value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import Config, dump_config, parse_config
from common.config.former_keys import GONE, LOSS_KEYS
from common.config.losses import SPECS
from common.config.section import section_of
from common.config.warnings import warnings
from common.errors import UserError

BASE = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}


def read(text: str) -> Config:
    return parse_config(BASE | yaml.safe_load(text))


def sections(model: Any = Config, at: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    """The path of each section, by its class."""
    found = {model.__name__: at}
    for name, field in model.model_fields.items():
        if (section := section_of(field.annotation)) is not None and name not in ("train", "heldout"):
            found |= sections(section, (*at, name))
    return found


def nested(path: tuple[str, ...], values: dict[str, Any]) -> dict[str, Any]:
    for key in reversed(path):
        values = {key: values}
    return values


@pytest.mark.parametrize(("section", "name"), [(section, name) for section in GONE for name in GONE[section]])
def test_another_value_is_refused_with_what_holds_today(section: str, name: str) -> None:
    key = GONE[section][name]
    with pytest.raises(UserError) as refused:
        parse_config(BASE | nested(sections()[section], {name: "another"}))
    for words in (".".join(sections()[section]), f"{name} = 'another' is no longer a key", key.today, "; remove it"):
        assert words in str(refused.value)


@pytest.mark.parametrize("name", LOSS_KEYS)
def test_a_key_of_losses_is_an_option_of_those_that_have_it(name: str) -> None:
    key, value = LOSS_KEYS[name], LOSS_KEYS[name].default / 2 + 0.6
    for loss in SPECS:
        options = {"beta": 1.0} if loss == "dro" else {}
        config = read(f"algorithm: {{loss: {loss}, {name}: {value}, loss_options: {options}}}")
        has_it = loss in key.losses
        assert config.algorithm.loss_options == options | ({key.option: value} if has_it else {})
        lines = [line for line in warnings(config) if name in line]
        assert len(lines) == 1
        assert ("say loss_options={" if has_it else "has no effect on loss") in lines[0]
        default = read(f"algorithm: {{loss: {loss}, {name}: {key.default}, loss_options: {options}}}")
        assert default.algorithm.loss_options == options
        assert "remove it" in " ".join(warnings(default))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{loss: 'my:loss', clip_high: 2}", "make it an option of 'my:loss', in loss_options"),
        ("{clip_low: -1}", "algorithm.loss_options.low = -1 of loss 'ppo_clip' must be a number in (0, inf)"),
    ],
)
def test_a_key_of_losses_that_cannot_be_moved_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words.replace("(", r"\(").replace(")", r"\)")):
        read(f"algorithm: {text}")


def test_a_run_folder_of_an_earlier_release_starts(tmp_path: Path) -> None:
    """It has all keys spelled out; one line a section says so."""
    tree = yaml.safe_load(dump_config(parse_config(BASE)))
    for section, gone in GONE.items():
        values = tree
        for key in sections()[section]:
            values = values[key]
        values.update({name: key.default for name, key in gone.items()})
    tree["algorithm"] |= {name: key.default for name, key in LOSS_KEYS.items()}
    tree["algorithm"]["correction"] |= {"bypass_mode": False, "loss_type": "ppo_clip"}
    config = parse_config(tree)
    assert dump_config(config) == dump_config(parse_config(BASE))
    assert len(warnings(config)) == len(GONE) + 2


@pytest.mark.parametrize(
    ("text", "key", "today", "words"),
    [
        ("data: {train: org/set, train_split: all}", "data.train", [{"path": "org/set", "split": "all"}], "older name"),
        ("data: {train: [{path: gsm8k}, {path: a}], train_split: all}", "data.train", [{}, {"split": "all"}], "older"),
        ("data: {train: t, heldout: org/set, heldout_split: all}", "data.heldout", [{"split": "all"}], "older name"),
        ("data: {train: t, heldout_split: test}", "data.heldout", None, "remove it"),
        ("{algorithm: {method: grpo, group_std: false}}", "algorithm.method", "dr_grpo", "say method='dr_grpo'"),
        (
            "{learner: {offload_optimizer: true, zero_stage: 2}}",
            "learner.offload",
            "optimizer",
            "say offload='optimizer'",
        ),
        ("{algorithm: {group_std: false}}", "algorithm.method", "spo", "remove it"),
    ],
)
def test_what_has_a_new_place_is_moved_there(text: str, key: str, today: Any, words: str) -> None:
    config = read(text)
    section, name = key.split(".")
    value = getattr(getattr(config, section), name)
    if isinstance(today, list):
        assert [{field: getattr(one, field) for field in ("path", "split") if field in wanted}
                for one, wanted in zip(value, today, strict=True)] == today  # fmt: skip
    else:
        assert value == today
    [line] = [line for line in warnings(config) if "longer a key" in line or "older name" in line]
    assert words in line
