"""The run's reward: which parts there are, what they add up to, and what cannot be meant."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import Config, parse_config
from common.errors import UserError
from generator.rewards import Outcome, Score, Scorer
from generator.rewards.pool import RewardFailed
from generator.rewards.registry import BUILTIN, check_reward, make_reward
from generator.rewards.scorer import joined
from tests.support.process_sandbox import ProcessSandbox

HERE = "tests.support.some_rewards"


def config(reward: Any, allowed: tuple[float, float] = (0.0, 1.0), **episode: Any) -> Config:
    return parse_config(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "sampler": {"tracker": {"reward_range": allowed}},
            "episode": {"reward": reward, "reward_workers": 1} | episode,
        }
    )


def score(reward: Any, outcome: Outcome, allowed: tuple[float, float] = (0.0, 1.0), **episode: Any) -> Score:
    async def scene() -> Score:
        scorer = Scorer(config(reward, allowed, **episode))
        try:
            return await scorer.score(outcome)
        finally:
            await scorer.close()

    return asyncio.run(scene())


def test_a_name_alone_is_a_reward_of_weight_one() -> None:
    assert score("exact", Outcome("7", answer=7)) == Score(1.0, {"exact": 1.0}, 1.0)


@pytest.mark.integration
def test_a_weighted_sum_over_all_the_places_rewards_run_in() -> None:
    outcome = Outcome("x" * 50, response="<a>", answer="no", tokens=19, limit=20)
    reward = {"exact": 1.0, "format": 0.5, "overlong": 0.25, f"{HERE}:shorter": 0.5}
    options = {"format": {"tags": ["<a>"]}, "overlong": {"buffer": 2}, f"{HERE}:shorter": {"scale": 200.0}}
    found = score(reward, outcome, (-1.0, 2.0), reward_options=options)
    assert found.parts == {"exact": 0.0, "format": 1.0, "overlong": -0.5, f"{HERE}:shorter": 0.75}
    assert found.value == 0.5 - 0.125 + 0.375


@pytest.mark.integration
def test_a_pattern_is_matched_in_a_process() -> None:
    options = {"format": {"pattern": r"(a|a)*b"}}
    assert score("format", Outcome("", response="aab"), reward_options=options) == Score(1.0, {"format": 1.0}, 1.0)
    with pytest.raises(TimeoutError, match="'format'"):
        score("format", Outcome("", response="a" * 100), reward_options=options, reward_timeout=0.5)


@pytest.mark.integration
def test_maths_runs_in_a_process() -> None:
    assert score("math", Outcome(r"\boxed{\frac12}", answer="0.5")).value == 1.0


@pytest.mark.integration
def test_a_users_class_sees_the_whole_outcome_and_keeps_its_state() -> None:
    name = f"{HERE}:Counting"

    async def scene() -> list[float]:
        scorer = Scorer(config(name, (0.0, 100.0), turn_rewards="ignore", reward_options={name: {"start": 5}}))
        outcome = Outcome("", response="abc", tokens=1, limit=2, turn_rewards=[10.0, 20.0])
        try:
            return [(await scorer.score(outcome)).value for _ in range(2)]
        finally:
            await scorer.close()

    assert asyncio.run(scene()) == [39.5, 40.5]


@pytest.mark.integration
def test_a_users_class_may_be_asynchronous() -> None:
    name = f"{HERE}:Asynchronous"

    async def scene() -> list[float]:
        scorer = Scorer(config(name))
        try:
            return [(await scorer.score(Outcome(""))).value for _ in range(3)]
        finally:
            await scorer.close()

    assert asyncio.run(scene()) == [1.0, 1.0, 1.0]


@pytest.mark.integration
def test_a_reward_outside_its_range_is_an_error_not_a_reward() -> None:
    with pytest.raises(ValueError, match=r"three 3.* is outside sampler.tracker.reward_range \[0, 1\]"):
        score(f"{HERE}:three", Outcome(""))


@pytest.mark.integration
def test_one_part_that_fails_fails_the_score() -> None:
    with pytest.raises(RewardFailed, match="KeyError"):
        score({"exact": 1.0, f"{HERE}:told": 1.0}, Outcome("raise", answer="raise"), (0.0, 2.0))


@pytest.mark.parametrize(
    ("how", "value", "turns"), [("sum", 0.75, 0.5), ("last", 0.375, 0.125), ("mean", 0.5, 0.25), ("ignore", 0.25, None)]
)
def test_turn_rewards_join_the_final_score(how: str, value: float, turns: float | None) -> None:
    outcome = Outcome("", tokens=15, limit=20, turn_rewards=[0.375, 0.125])
    found = score("length", outcome, turn_rewards=how)
    assert found == Score(value, {"length": 0.25} | ({} if turns is None else {"turns": turns}), 0.25)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=9), st.sampled_from(["sum", "last", "mean"]))
def test_with_turn_rewards_the_result_is_clipped(turns: list[float], how: str) -> None:
    found = score("exact", Outcome("a", answer="a", turn_rewards=turns), turn_rewards=how)
    assert found.value == min(max(1.0 + joined(turns, how), 0.0), 1.0)


@pytest.mark.integration
def test_without_turn_rewards_nothing_is_clipped() -> None:
    for outcome, how in ((Outcome(""), "sum"), (Outcome("", turn_rewards=[5.0]), "ignore")):
        with pytest.raises(ValueError, match="reward_range"):
            score(f"{HERE}:three", outcome, turn_rewards=how)


@pytest.mark.parametrize("turns", [[float("nan")], [0.0, float("inf")]])
def test_a_turn_reward_that_is_no_number_is_an_error(turns: Sequence[float]) -> None:
    with pytest.raises(ValueError, match="turn rewards"):
        score("exact", Outcome("", turn_rewards=turns))


@pytest.mark.parametrize(
    ("reward", "options", "message"),
    [
        (
            "levenshtein",
            {},
            "'levenshtein' is unknown; allowed: exact, boxed, boxed_think, math, reasoning_gym, code, format",
        ),
        ("no.such.module:f", {}, "cannot import no.such.module"),
        (f"{HERE}:missing", {}, "has no missing"),
        (f"{HERE}:NOT_CALLABLE", {}, "neither a function of \\(text, answer, row\\) nor a class"),
        (f"{HERE}:NoScore", {}, "no method score"),
        (f"{HERE}:shorter", {"size": 1}, "reward_options of .*unexpected keyword argument 'size'"),
        (f"{HERE}:Counting", {"begin": 1}, "reward_options of .*'begin'"),
        ("exact", {"strict": True}, "reward_options of 'exact'"),
        ("format", {}, "reward_options of 'format': give either"),
        ("math", {"seconds": -1}, "reward_options of 'math': seconds = -1"),
        ("math", {"seconds": "long"}, "reward_options of 'math'"),
        ("judge", {}, "reward_options of 'judge': .*base_url"),
        ("code", {"timeout": 0}, "reward_options of 'code': timeout = 0"),
    ],
)
def test_what_cannot_be_meant_is_a_user_error_before_the_first_episode(
    reward: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Scorer(config(reward, reward_options={reward: options}), ProcessSandbox)


@pytest.mark.parametrize(
    ("reward", "allowed"),
    [
        ("overlong", (0.0, 1.0)),
        ({"exact": 1.0, "overlong": 1.0}, (0.0, 1.0)),
        ({"exact": 1.0, "boxed": 0.5}, (0.0, 1.0)),
        ({"exact": -1.0}, (0.0, 1.0)),
    ],
)
def test_parts_that_cannot_fit_the_range_are_a_user_error(reward: Any, allowed: tuple[float, float]) -> None:
    with pytest.raises(UserError, match=r"declare that range"):
        Scorer(config(reward, allowed))


def test_parts_that_fit_their_range_are_none() -> None:
    Scorer(config({"exact": 1.0, "overlong": 1.0}, (-1.0, 1.0)))
    Scorer(config({"exact": 2.0, "length": -1.0}, (-1.0, 2.0)))


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        ({"reward": {}}, "names no reward"),
        ({"reward": {"exact": float("inf")}}, "finite"),
        ({"reward": "exact", "reward_options": {"boxed": {}}}, "'boxed', which is not part of episode.reward \\(exact"),
    ],
)
def test_the_configuration_names_rewards_that_are_there(episode: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_config({"model": {"path": "m"}, "data": {"train": "t"}, "episode": episode})


def test_every_built_in_says_where_it_runs_and_how_far_it_goes() -> None:
    needed: dict[str, dict[str, Any]] = {
        "format": {"tags": ["a"]},
        "judge": {"base_url": "http://127.0.0.1:1/v1", "model": "m"},
        "code": {"sandbox": ProcessSandbox()},
    }
    for name in BUILTIN:
        check_reward(name, needed.get(name, {}))
        reward = make_reward(name, needed.get(name, {}))
        assert reward.where in ("inline", "pool", "loop")
        low, high = reward.bounds
        assert low < high


FOUR_PARTS = ("boxed", "boxed_think", "format", "length")
SPLITS = [
    (a / 20, b / 20, c / 20, (20 - a - b - c) / 20)
    for a in range(1, 18)
    for b in range(1, 19 - a)
    for c in range(1, 20 - a - b)
]
PERFECT = Outcome(r"\boxed{7}", response=r"<a></think>\boxed{7}", answer=7, tokens=0, limit=10)


def four_part(weights: Sequence[float], **changes: Any) -> dict[str, Any]:
    """Keyword arguments of `score` for a reward of four parts."""
    options = {"format": {"tags": ["<a>"]}}
    return {"reward": dict(zip(FOUR_PARTS, weights, strict=True)), "reward_options": options, **changes}


def test_a_perfect_answer_has_the_full_reward_however_its_weights_are_split() -> None:
    assert len(SPLITS) == 969
    whole = Score(1.0, dict.fromkeys(FOUR_PARTS, 1.0), 1.0)
    wrong = {weights for weights in SPLITS if score(outcome=PERFECT, **four_part(weights)) != whole}
    assert wrong == set()


def test_more_than_rounding_beyond_the_range_is_refused() -> None:
    with pytest.raises(UserError, match="declare that range"):
        score(outcome=PERFECT, **four_part((0.05, 0.55, 0.3, 0.1001)))
    thirds = {"boxed": 1 / 3, "boxed_think": 1 / 3, "format": 1 / 3, "length": -1e-12}
    assert score(thirds, PERFECT, reward_options={"format": {"tags": ["<a>"]}}).value == 1.0
