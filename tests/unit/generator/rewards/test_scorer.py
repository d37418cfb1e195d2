"""The run's reward: how functions are called, the parts, their sum, and the configurations that are refused."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import Config
from common.errors import UserError
from generator.episode.parts import EpisodeParts
from generator.rewards import Outcome, Score, Scorer
from generator.rewards.calls import Function
from generator.rewards.pool import RewardFailed
from generator.rewards.scorer import returns_to_go
from tests.support.documented import DOCS
from tests.support.episode import configured, scored
from tests.support.event_loop import used

HERE = "tests.support.some_rewards"


def config(reward: Any, allowed: tuple[float, float] = (0.0, 1.0), **episode: Any) -> Config:
    tracker = {"reward_range": allowed}
    return configured({"sampler": {"tracker": tracker}}, reward=reward, reward_workers=1, **episode)


def score(reward: Any, outcome: Outcome, allowed: tuple[float, float] = (0.0, 1.0), **episode: Any) -> Score:
    return scored(config(reward, allowed, **episode), outcome)[0]


@pytest.mark.integration
def test_a_weighted_sum_over_all_the_places_rewards_run_in() -> None:
    reward = {"exact": 1.0, "format": 0.5, "overlong": 0.25, f"{HERE}:shorter": 0.5, "math": 1.0}
    options = {"format": {"pattern": r"<(a|a)*>b"}, "overlong": {"buffer": 2}, f"{HERE}:shorter": {"scale": 200.0}}
    settings = config(reward, (-1.0, 3.0), reward_options=options, reward_timeout=3.0)
    text = r"\boxed{\frac12}" + "x" * 35

    async def both(scorer: Scorer) -> Score:
        made = await scorer.score(Outcome(text, response="<a>b", answer="0.5", tokens=19, limit=20))
        with pytest.raises(TimeoutError, match="'format'"):
            await scorer.score(Outcome(text, response="<" + "a" * 100, answer="0.5", tokens=19, limit=20))
        return made

    made = used(lambda: Scorer(settings), both)
    assert made.parts == {"exact": 0.0, "format": 1.0, "overlong": -0.5, f"{HERE}:shorter": 0.75, "math": 1.0}
    assert made.value == 0.5 - 0.125 + 0.375 + 1.0


@pytest.mark.integration
def test_a_part_that_fails_or_leaves_the_range_is_an_error() -> None:
    with pytest.raises(RewardFailed, match="ZeroDivisionError"):
        score({"exact": 1.0, f"{HERE}:told": 1.0}, Outcome("1 / 0"), (0.0, 2.0))
    for outcome, how in ((Outcome(""), "sum"), (Outcome("", turn_rewards=[5.0]), "ignore")):
        with pytest.raises(ValueError, match=r"three 3.* is outside sampler.tracker.reward_range \[0, 1\]"):
            score(f"{HERE}:three", outcome, turn_rewards=how)


@pytest.mark.integration
def test_a_part_without_a_number_is_left_out_of_the_sum() -> None:
    both = {"length": 0.5, f"{HERE}:skips": 0.5}
    without, with_it = scored(config(both), *(Outcome(text, tokens=5, limit=10) for text in ("", "a")))
    assert without == Score(0.25, {"length": 0.5}, 0.25)
    assert with_it.value == 0.75
    with pytest.raises(RewardFailed, match="returned \\[None\\], and no other part gives a number"):
        score(f"{HERE}:skips", Outcome(""))


@pytest.mark.parametrize(
    ("how", "value", "turns"), [("sum", 0.75, 0.5), ("last", 0.375, 0.125), ("mean", 0.5, 0.25), ("ignore", 0.25, None)]
)
def test_turn_rewards_join_the_final_score(how: str, value: float, turns: float | None) -> None:
    made = score("length", Outcome("", tokens=15, limit=20, turn_rewards=[0.375, 0.125]), turn_rewards=how)
    assert made == Score(value, {"length": 0.25} | ({} if turns is None else {"turns": turns}), 0.25)
    clipped = score("exact", Outcome("a", answer="a", turn_rewards=[9.0]), turn_rewards=how)
    assert clipped.value == 1.0
    if turns is not None:
        with pytest.raises(ValueError, match="turn rewards"):
            score("exact", Outcome("", turn_rewards=[0.0, float("inf")]), turn_rewards=how)


@pytest.mark.parametrize(
    ("reward", "allowed", "fits"),
    [
        ({"exact": 1.0, "overlong": 1.0}, (0.0, 1.0), False),
        ({"exact": 1.0, "overlong": 1.0}, (-1.0, 1.0), True),
        ({"exact": 2.0, "length": -1.0}, (-1.0, 2.0), True),
        # Only what rounding explains is forgiven.
        ({"exact": 0.1, "boxed": 0.7, "length": 0.2}, (0.0, 1.0), True),
        ({"exact": 0.1, "boxed": 0.7, "length": 0.2001}, (0.0, 1.0), False),
    ],
)
def test_parts_must_fit_the_declared_range(reward: Any, allowed: tuple[float, float], fits: bool) -> None:
    with contextlib.nullcontext() if fits else pytest.raises(UserError, match="declare that range"):
        Scorer(config(reward, allowed))


def test_the_documented_configurations_are_possible() -> None:
    page = (DOCS / "rewards.md").read_text(encoding="utf-8")
    for written in re.findall(r"```yaml\n(episode:.*?)```", page, re.DOTALL):
        EpisodeParts(configured(yaml.safe_load(written)))


REWARDS = st.floats(-2, 2, allow_subnormal=False)


@pytest.mark.parametrize(
    ("final", "turns", "returns"),
    [
        (0.5, [0.25, -0.5, 0.125], [0.375, 0.125, 0.625]),
        # What the user gave earlier is past; what the limits took of the total is not missed later.
        (1.0, [-0.5, -0.75, 0.0], [0.0, 0.25, 1.0]),
        (1.0, [0.5, 0.0], [1.0, 1.0]),
    ],
)
def test_the_return_of_a_turn_adds_up_what_follows(final: float, turns: list[float], returns: list[float]) -> None:
    assert returns_to_go(final, turns, (0.0, 1.0)) == returns


@settings(max_examples=25)
@given(turns=st.lists(REWARDS, min_size=1, max_size=9), text=st.sampled_from(["7", "8"]))
def test_the_first_turns_return_is_the_episodes_reward(turns: list[float], text: str) -> None:
    made = score("exact", Outcome(text, answer=7, turn_rewards=turns))
    assert returns_to_go(made.final, turns, (0.0, 1.0))[0] == made.value


ROW = {"data_source": "gsm8k", "extra_info": {"index": 3}, "level": 2}
OUTCOME = Outcome("7", response="hm 7", answer=7, row=ROW, prompt="3+4?", tokens=5, limit=9, answer_column="solution")
COLUMNS = {"answer": ["7"], "solution": ["7"]} | {name: [value] for name, value in ROW.items()}
CHAT = Outcome("7", response="hm 7", answer=7, row={}, prompt=[{"role": "user", "content": "3+4?"}])


def ours(text: str, answer: str, row: dict[str, Any]) -> Any:
    return text, answer, row


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    return data_source, solution_str, ground_truth, extra_info


def verl_short(solution_str: str, ground_truth: str, **kwargs: Any) -> Any:
    return solution_str, ground_truth, kwargs


def trl(prompts: list[Any], completions: list[Any], **columns: Any) -> Any:
    return prompts, completions, columns


class Callable:
    def __call__(self, solution_str: str, ground_truth: str) -> Any:
        return solution_str, ground_truth


@functools.wraps(verl)
def wrapped(*arguments: Any, **named: Any) -> Any:
    return verl(*arguments, **named)


@pytest.mark.parametrize(
    ("function", "options", "result"),
    [
        (ours, {}, ("7", "7", ROW)),
        (lambda text, /, answer, *, row: (text, answer, row), {}, ("7", "7", ROW)),
        (lambda text, _answer, _row: text, {}, "7"),
        (lambda response, prompt, tokens: (response, prompt, tokens), {}, ("hm 7", "3+4?", 5)),
        (lambda text, scale, limit=100: (text, scale, limit), {"scale": 2}, ("7", 2, 100)),
        (lambda text, limit=100: (text, limit), {"limit": 4}, ("7", 4)),
        (lambda text, **more: (text, more), {"scale": 2}, ("7", {"answer": "7", "row": ROW, "scale": 2})),
        (functools.partial(ours, row=None), {}, ("7", "7", ROW)),
        (verl, {}, ("gsm8k", "hm 7", "7", {"index": 3})),
        (wrapped, {}, ("gsm8k", "hm 7", "7", {"index": 3})),
        (verl_short, {}, ("hm 7", "7", {"data_source": "gsm8k", "extra_info": {"index": 3}})),
        (Callable(), {}, ("hm 7", "7")),
        (trl, {}, (["3+4?"], ["hm 7"], COLUMNS)),
        (lambda completions, solution, hint=None: (completions, solution, hint), {}, (["hm 7"], ["7"], None)),
        (lambda completions, level, least=1: (completions, level, least), {"least": 3}, (["hm 7"], [2], 3)),
    ],
)  # fmt: skip
def test_parameters_are_filled_by_their_names(function: Any, options: dict[str, Any], result: Any) -> None:
    assert Function("m:f", function, options).score(OUTCOME) == result


def test_completions_of_chat_prompts_are_messages() -> None:
    prompts, completions, columns = Function("m:f", trl, {}).score(CHAT)
    assert prompts == [CHAT.prompt]
    assert completions == [[{"role": "assistant", "content": "hm 7"}]]
    assert columns == {"answer": ["7"]}


def test_a_column_that_a_row_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="no column 'hint', which the function asks for"):
        Function("m:f", lambda completions, hint: completions, {}).score(OUTCOME)


FORMS = r"\(text, answer, row\), or verl's \(data_source, .*\), or TRL's \(prompts, completions, \*\*columns\)"


@pytest.mark.parametrize(
    ("function", "options", "problem"),
    [
        (lambda answer_text, reference: 1.0, {}, f"{FORMS}.*: there is no value named 'answer_text'"),
        (lambda completions, completion_ids: 1.0, {}, "there is no value named 'completion_ids'"),
        (lambda *anything: 1.0, {}, "its parameters have none of these names"),
        (max, {}, "cannot be called with"),
        (ours, {"row": {}}, "reward_options of 'm:f': 'row' is not an option; allowed: none"),
        (ours, {"size": 1}, "unexpected keyword argument 'size'"),
    ],
)
def test_what_cannot_be_filled_is_refused_with_the_forms(function: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        Function("m:f", function, options)
