"""What followed each turn of an episode, in rewards."""

from __future__ import annotations

import asyncio
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import parse_config
from generator.rewards import Outcome, Scorer
from generator.rewards.scorer import returns_to_go

REWARDS = st.floats(-2, 2, allow_subnormal=False)


@pytest.mark.parametrize(
    ("final", "turns", "returns"),
    [
        (0.5, [0.0], [0.5]),
        (0.5, [0.25, -0.5, 0.125], [0.375, 0.125, 0.625]),
        # What the user gave earlier is past; what the limits took of the total is not missed later.
        (1.0, [-0.5, -0.75, 0.0], [0.0, 0.25, 1.0]),
        (1.0, [0.5, 0.0], [1.0, 1.0]),
        (0.0, [], []),
    ],
)
def test_the_return_of_a_turn_adds_up_what_follows_it(final: float, turns: list[float], returns: list[float]) -> None:
    assert returns_to_go(final, turns, (0.0, 1.0)) == returns


@given(final=REWARDS, turns=st.lists(REWARDS, min_size=1, max_size=9), low=st.floats(-3, 0), width=st.floats(0.1, 5))
def test_returns_equal_a_sum_without_rounding(final: float, turns: list[float], low: float, width: float) -> None:
    for start, value in enumerate(returns_to_go(final, turns, (low, low + width))):
        exact = Fraction(final) + sum(map(Fraction, turns[start:]))
        assert value == pytest.approx(float(min(max(exact, Fraction(low)), Fraction(low + width))), abs=1e-12)


@given(turns=st.lists(REWARDS, min_size=1, max_size=9), text=st.sampled_from(["7", "8"]))
def test_the_return_of_the_first_turn_is_the_reward_of_the_episode(turns: list[float], text: str) -> None:
    scorer = Scorer(parse_config({"model": {"path": "m"}, "data": {"train": "t"}}))
    score = asyncio.run(scorer.score(Outcome(text, answer=7, turn_rewards=turns)))
    assert returns_to_go(score.final, turns, (0.0, 1.0))[0] == score.value
