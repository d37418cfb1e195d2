"""Rewards for length: their formulas, at the corners and between."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from generator.rewards.outcome import Outcome
from generator.rewards.rules import Length, Overlong


def outcome(tokens: int, limit: int = 20_480) -> Outcome:
    return Outcome("", tokens=tokens, limit=limit)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 0), (16_384, 0), (16_385, -1 / 4096), (18_432, -0.5), (20_480, -1), (20_481, -1), (10**6, -1)],
)
def test_overlong_is_the_papers_with_the_papers_lengths(tokens: int, expected: float) -> None:
    assert Overlong(buffer=4096).score(outcome(tokens)) == pytest.approx(expected)
    assert Overlong().score(outcome(tokens)) == pytest.approx(expected)
    assert Overlong(buffer=4096, limit=20_480).score(outcome(tokens, limit=1)) == pytest.approx(expected)


@pytest.mark.parametrize(("tokens", "expected"), [(0, 1), (100, 1), (101, 0.99), (150, 0.5), (200, 0), (999, 0)])
def test_length_falls_from_the_free_tokens_to_the_limit(tokens: int, expected: float) -> None:
    assert Length(free=100).score(outcome(tokens, 200)) == pytest.approx(expected)
    assert Length(free=100, limit=200).score(outcome(tokens, 5)) == pytest.approx(expected)


def test_all_tokens_are_free_where_the_limit_is_below_them() -> None:
    assert Length(free=300).score(outcome(200, 200)) == 1


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 3000))
def test_longer_is_never_better_and_bounds_hold(a: int, b: int, limit: int) -> None:
    for reward in (Length(), Length(free=10), Overlong(), Overlong(buffer=7)):
        shorter, longer = (reward.score(outcome(tokens, limit)) for tokens in sorted((a, b)))
        low, high = reward.bounds
        assert low <= longer <= shorter <= high


@pytest.mark.parametrize(
    ("reward", "options"),
    [
        (Length, {"free": -1}),
        (Length, {"free": 10, "limit": 10}),
        (Overlong, {"buffer": 0}),
        (Overlong, {"buffer": 11, "limit": 10}),
        (Overlong, {"limit": 0}),
        (Overlong, {"limit": -5}),
    ],
)
def test_impossible_lengths_are_refused(reward: Any, options: dict[str, int]) -> None:
    with pytest.raises(UserError):
        reward(**options)
