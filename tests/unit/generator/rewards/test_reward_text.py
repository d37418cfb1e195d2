"""Rewards read off the text: exact match, boxed answers (golden M01), format."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import UserError
from generator.rewards.outcome import Outcome
from generator.rewards.rules import Boxed, BoxedThink, Exact, Format, last_boxed
from tests.support.golden import GOLDEN

M01 = GOLDEN["M01"]


@pytest.mark.parametrize(
    ("solution", "expected"), list(zip(M01["inputs"]["solutions"], M01["expected"]["scores"], strict=True))
)
def test_golden_m01_the_recipes_boxed_answer(solution: str, expected: float) -> None:
    outcome = Outcome("", response=solution, answer=M01["inputs"]["ground_truth"])
    assert BoxedThink().score(outcome) == expected


def test_the_recipe_reads_the_whole_response_and_boxed_the_last_turn_alone() -> None:
    outcome = Outcome(r"\boxed{1}", response=r"</think> \boxed{2}", answer="2")
    assert (BoxedThink().score(outcome), Boxed().score(outcome)) == (1, 0)


def test_exact_ignores_white_space_around_only() -> None:
    assert [Exact().score(Outcome(text, answer=89)) for text in ("89", " 89\n", "089", "8 9", "")] == [1, 1, 0, 0, 0]


def test_boxed_takes_the_last_box_of_the_final_100_characters() -> None:
    def score(text: str) -> float:
        return Boxed().score(Outcome(text, answer="42"))

    assert score(r"so \boxed{41} no, \boxed{ 42 }") == 1
    assert score(r"\boxed{42}" + "." * 90) == 1
    assert score(r"\boxed{42}" + "." * 91) == 0


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{a {b} c}} d}", r"\text{a {b} c}"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{}", ""),
        (r"\boxed 4", None),
        ("", None),
        ("\\boxed{" * 10_000, None),
    ],
)
def test_braces_within_a_box_are_balanced(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("x <think></think> y <answer>b</answer> z", 1),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("", 0),
    ],
)
def test_tags_occur_once_and_in_order(response: str, expected: float) -> None:
    wanted = Format(tags=["<think>", "</think>", "<answer>", "</answer>"])
    assert wanted.score(Outcome("", response=response)) == expected


def test_a_pattern_matches_the_whole_text_over_line_ends() -> None:
    wanted = Format(pattern=r"<think>.*</think>\s*\d+")
    scores = [
        wanted.score(Outcome("", response=text)) for text in ("<think>a\nb</think>\n42", "so <think></think>42", "42")
    ]
    assert scores == [1, 0, 0]
    assert Format(pattern=r"\d+", of="text").score(Outcome("42", response="so 42")) == 1


def test_a_pattern_is_not_tried_on_the_event_loop() -> None:
    assert (Format(pattern="a").where, Format(tags=["a"]).where) == ("pool", "inline")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pattern": "a", "tags": ["b"]},
        {"pattern": "("},
        {"tags": "<think>"},
        {"tags": [1]},
        {"tags": [""]},
        {"tags": []},
        {"tags": ["a"], "of": "answer"},
    ],
)
def test_a_format_that_cannot_be_meant_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Format(**options)
