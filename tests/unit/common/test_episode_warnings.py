"""A simulated user who cannot speak as often as he is meant to is named, with the ways out."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from common.config import parse_config
from common.config.warnings import TURN_OPTIONS, warnings
from generator.users.load import BUILTIN


def told(user: str | None = "corrector", assistant: int = 4, **episode: Any) -> list[str]:
    config = {"user": user, "max_assistant_turns": assistant} | episode
    return warnings(parse_config({"model": {"path": "m"}, "data": {"train": "t"}, "episode": config}))


@pytest.mark.parametrize(
    ("user", "assistant", "options", "line"),
    [
        (
            "corrector",
            3,
            {},
            "episode.user_options.turns = 3, its default, is cut short to 2 by episode.max_assistant_turns = 3 "
            "(set it to 4 or more); or set turns=2",
        ),
        (
            "corrector",
            2,
            {"turns": 2},
            "episode.user_options.turns = 2 is cut short to 1 by episode.max_assistant_turns = 2 (set it to 3 or more)"
            "; or set turns=1",
        ),
        (
            "llm",
            5,
            {"base_url": "http://127.0.0.1:1", "model": "m"},
            "episode.user_options.max_turns = 5, its default, is cut short to 4 by episode.max_assistant_turns = 5 "
            "(set it to 6 or more); or set max_turns=4",
        ),
    ],
)
def test_too_few_turns_of_the_assistant_cut_a_user_short(
    user: str, assistant: int, options: dict[str, Any], line: str
) -> None:
    assert told(user, assistant, user_options=options) == [line]


def test_too_few_turns_of_the_user_cut_him_short_too() -> None:
    assert told(assistant=3, max_user_turns=1) == [
        "episode.user_options.turns = 3, its default, is cut short to 1 by episode.max_assistant_turns = 3 (set it to "
        "4 or more) and episode.max_user_turns = 1 (set it to 3 or more); or set turns=1"
    ]


@pytest.mark.parametrize(
    "episode",
    [
        {"assistant": 4},
        {"assistant": 4, "max_user_turns": 3},
        {"assistant": 2, "user_options": {"turns": 1}},
        {"assistant": 2, "user": "scripted"},  # how much he says stands in the data
        {"assistant": 2, "user": "somebody:Else"},
        {"assistant": 1, "user": None},
        {"assistant": 2, "user_options": {"turns": "two"}},  # refused by the generator
    ],
    ids=str,
)
def test_what_fits_is_not_named(episode: dict[str, Any]) -> None:
    assert told(**episode) == []


@pytest.mark.parametrize("user", TURN_OPTIONS)
def test_the_options_and_their_defaults_are_the_users_own(user: str) -> None:
    option, default = TURN_OPTIONS[user]
    assert inspect.signature(BUILTIN[user]).parameters[option].default == default
