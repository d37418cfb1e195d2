"""docs/rewards.md names every reward there is, with its options and its range, and no other."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields
from typing import Any, get_args

import pytest
import yaml

from common.config import EpisodeConfig, parse_config
from generator.chat_api import ChatApi
from generator.parts import EpisodeParts
from generator.rewards import Outcome
from generator.rewards.judge import Judge
from generator.rewards.registry import BUILTIN, Where, make_reward
from tests.support.documented import DOCS, section

PAGE = (DOCS / "rewards.md").read_text(encoding="utf-8")
# What a reward needs to be made at all.
NEEDED: dict[str, dict[str, Any]] = {
    "format": {"tags": ["a"]},
    "judge": {"base_url": "http://127.0.0.1:1", "model": "m"},
    "code": {"sandbox": None},
}
RUNS: dict[Where, str] = {"inline": "at once", "pool": "in a process", "loop": "sandbox|endpoint"}


def rows() -> dict[str, list[str]]:
    """Cells of the table of rewards, by name."""
    lines = [line for line in PAGE.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first.strip("`"): rest for first, *rest in cells}


def kind(name: str) -> Any:
    module, _, attribute = BUILTIN[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def test_every_reward_is_documented_and_every_documented_one_exists() -> None:
    assert list(rows()) == list(BUILTIN)


@pytest.mark.parametrize("name", [name for name in BUILTIN if name != "judge"])
def test_every_option_is_documented_and_every_documented_one_exists(name: str) -> None:
    options = [option for option in inspect.signature(kind(name)).parameters if option != "sandbox"]
    values = {"response", "text"}
    assert set(re.findall(r"`(\w+)`", rows()[name][2])) - values == set(options)


@pytest.mark.parametrize("name", BUILTIN)
def test_the_documented_range_and_place_are_the_reward_s_own(name: str) -> None:
    made = make_reward(name, NEEDED.get(name, {}))
    _, shown, _, runs = rows()[name]
    low, high = (float(end) for end in shown.replace("−", "-").strip("[]").split(","))
    assert (low, high) == made.bounds
    assert re.search(RUNS[made.where], runs)


def test_the_judge_s_options_are_all_there() -> None:
    text = section("rewards.md", "The judge")
    written = {
        option
        for line in text.splitlines()
        if line.startswith("| `")
        for option in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    own = {name for name in inspect.signature(Judge).parameters if name != "connection"}
    endpoint = set(inspect.signature(ChatApi).parameters) - {"api_key"} | {"api_key_env"}
    assert written == own | endpoint


def test_the_outcome_is_documented_field_by_field() -> None:
    text = section("rewards.md", "A reward of your own")
    written = [
        name
        for line in text.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    ]
    assert sorted(written) == sorted(field.name for field in fields(Outcome))


def test_documented_defaults_of_the_processes_are_the_configuration_s() -> None:
    text = section("rewards.md", "Where rewards run")
    for name in ("reward_timeout", "reward_workers", "reward_memory_mb"):
        found = re.search(rf"`episode\.{name}` \(([\d,]+)", text)
        assert found is not None
        assert float(found[1].replace(",", "")) == EpisodeConfig.model_fields[name].default


@pytest.mark.parametrize("title", [None, "The judge"])
def test_the_configurations_of_the_page_are_possible(title: str | None) -> None:
    text = PAGE if title is None else section("rewards.md", title)
    (written, *_) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    EpisodeParts(parse_config({"model": {"path": "m"}, "data": {"train": "t"}} | yaml.safe_load(written)))


def test_the_ways_an_episode_ends_are_those_the_page_lists() -> None:
    from generator import episode_runner

    named = re.findall(r"`(\w+)`", re.findall(r"\| `reason` \| (.*) \|", PAGE)[0])
    assert set(named) == set(re.findall(r"`(stop|user|length|max_\w+)`[:,]", episode_runner.__doc__ or ""))
    assert get_args(Where) == tuple(RUNS)
