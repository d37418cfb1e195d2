"""How a user's function is called: by the names of its parameters, which are SPO's, verl's or TRL's."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from common.errors import UserError
from generator.rewards import Outcome
from generator.rewards.calls import Function

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
        (ours, {"row": {}}, "reward_options of 'm:f': 'row' is no option; allowed: none"),
        (ours, {"size": 1}, "unexpected keyword argument 'size'"),
    ],
)
def test_what_cannot_be_filled_is_refused_with_the_forms(function: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        Function("m:f", function, options)
