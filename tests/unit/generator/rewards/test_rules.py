"""Rewards by rule: exact match, boxed answers (golden M01), format, and length, at the corners and between."""

from __future__ import annotations

from typing import Any

import pytest

from generator.rewards import Outcome
from generator.rewards.rules import Boxed, BoxedThink, Exact, Format, Length, Overlong, last_boxed
from tests.support.golden import GOLDEN

M01 = GOLDEN["M01"]
THINK = ["<think>", "</think>", "<answer>", "</answer>"]


def test_golden_m01_the_recipes_boxed_answer() -> None:
    # `boxed_think` reads the whole response, `boxed` the last turn.
    outcomes = [Outcome("", response=text, answer=M01["inputs"]["ground_truth"]) for text in M01["inputs"]["solutions"]]
    assert [BoxedThink().score(outcome) for outcome in outcomes] == M01["expected"]["scores"]
    assert {Boxed().score(outcome) for outcome in outcomes} == {0.0}


@pytest.mark.parametrize(
    ("reward", "text", "answer", "expected"),
    [
        *((Exact(), text, 89, value) for text, value in {" 89\n": 1, "089": 0, "": 0}.items()),
        (Boxed(), r"so \boxed{41} no, \boxed{ 42 }", "42", 1),
        # Within the final 100 characters.
        (Boxed(), r"\boxed{42}" + "." * 90, "42", 1),
        (Boxed(), r"\boxed{42}" + "." * 91, "42", 0),
        # Booleans, lists and mappings are compared as documented.
        (Exact(), "True", True, 1),
        (Exact(), "1", True, 0),
        (Exact(), '{"x": null}', {"x": None}, 1),
        (Exact(), "0.00001", 1e-05, 1),
        (Exact(), "79", 79.0, 1),
        (Format(pattern=r"\d+", of="text"), "42", None, 1),
    ],
)
def test_the_last_turn_is_compared_with_the_answer(reward: Any, text: str, answer: Any, expected: float) -> None:
    assert reward.score(Outcome(text, response=f"so {text}", answer=answer)) == expected


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\text{a {b} c}} d}", r"\text{a {b} c}"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed 4", None),
        ("\\boxed{" * 10_000, None),
    ],
)
def test_braces_within_a_box_are_balanced(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("options", "response", "expected"),
    [
        ({"tags": THINK}, "<think>a</think><answer>b</answer>", 1),
        ({"tags": THINK}, "x <think></think> y <answer>b</answer> z", 1),
        ({"tags": THINK}, "<answer>b</answer><think>a</think>", 0),
        ({"tags": THINK}, "<think>a</think><think>a</think><answer>b</answer>", 0),
        ({"tags": THINK}, "<think>a</think><answer>b", 0),
        ({"pattern": r"<think>.*</think>\s*\d+"}, "<think>a\nb</think>\n42", 1),
        ({"pattern": r"<think>.*</think>\s*\d+"}, "so <think></think>42", 0),
    ],
)
def test_format_wants_tags_in_order_or_a_pattern(options: Any, response: str, expected: float) -> None:
    wanted = Format(**options)
    assert wanted.score(Outcome("", response=response)) == expected
    assert wanted.where == ("inline" if "tags" in options else "pool")  # a pattern may backtrack for hours


@pytest.mark.parametrize(
    ("options", "opened", "response", "expected"),
    [
        ({"tags": THINK[:2]}, "<think>\n", "a</think>42", 1),
        ({"tags": THINK[:2]}, "<think>\n", "<think>a</think>42", 0),  # which would be the second
        ({"tags": THINK}, "<think>\n", "a<answer>b</answer></think>", 0),
        ({"tags": THINK[:2], "of": "text"}, "<think>\n", "a</think>42", 1),
        ({"pattern": r"<think>.*</think>\s*\d+"}, "<think>\n", "a</think>42", 1),
        ({"pattern": r"[^<]*</think>\s*\d+"}, "<think>\n", "a</think>42", 1),
        ({"pattern": r"<think>.*</think>\s*\d+"}, "<answer>", "a</think>42", 0),
    ],
)
def test_format_sees_tags_that_the_template_has_opened(
    options: Any, opened: str, response: str, expected: float
) -> None:
    assert Format(**options).score(Outcome(response, response=response, opened=opened)) == expected


def outcome(tokens: int, limit: int = 20_480) -> Outcome:
    return Outcome("", tokens=tokens, limit=limit)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(16_384, 0), (16_385, -1 / 4096), (18_432, -0.5), (20_480, -1), (20_481, -1)],
)
def test_overlong_is_the_papers_with_the_papers_lengths(tokens: int, expected: float) -> None:
    assert Overlong(buffer=4096).score(outcome(tokens)) == pytest.approx(expected)
    assert Overlong().score(outcome(tokens)) == pytest.approx(expected)
    assert Overlong(buffer=4096, limit=20_480).score(outcome(tokens, limit=1)) == pytest.approx(expected)


@pytest.mark.parametrize(("tokens", "expected"), [(100, 1), (101, 0.99), (200, 0), (999, 0)])
def test_length_falls_from_the_free_tokens_to_the_limit(tokens: int, expected: float) -> None:
    assert Length(free=100).score(outcome(tokens, 200)) == pytest.approx(expected)
    assert Length(free=100, limit=200).score(outcome(tokens, 5)) == pytest.approx(expected)
    assert Length(free=300).score(outcome(200, 200)) == 1
