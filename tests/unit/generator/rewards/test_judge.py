"""The judge: what is asked, which number counts, and endpoints that fail, which are never a reward."""

from __future__ import annotations

from typing import Any

import pytest

from generator.chat_api import ChatUnavailable
from generator.rewards import Outcome
from generator.rewards.judge import Judge, NoVerdict
from tests.support.event_loop import used
from tests.support.http_double import Double, fails, says, serve

ASKED = Outcome("Four.", response="Let me see. Four.", answer="4", row={"level": "easy"}, prompt="What is 2+2?")


def judge(double: Double, outcome: Outcome = ASKED, **options: Any) -> float:
    options = {"backoff": 0.0, "attempts": 2} | options
    return used(lambda: Judge(f"{double.url}/v1", "tiny", **options), lambda made: made.score(outcome))


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([says("Score: 7")], 0.7),
        ([says("At first Score: 2, but then\nScore: 7.5")], 0.75),
        ([says("Hard to say."), says("Score: 11"), says("Score: 4")], 0.4),
        ([fails(503), says("Score: 5")], 0.5),
    ],
)
def test_the_last_number_counts_on_its_scale(replies: list[Any], expected: float) -> None:
    with serve(*replies) as double:
        assert judge(double) == pytest.approx(expected)
    assert len(double.requests) == len(replies)
    # A reply without a number is asked for again, at another temperature.
    again = 0.0 if len(replies) == 2 else 1.0
    assert [request["temperature"] for request in double.requests] == [0.0] + [again] * (len(replies) - 1)


def test_question_reference_and_answer_are_shown() -> None:
    with serve(says("Score: 1")) as double:
        judge(double, system="You are strict.", parameters={"max_tokens": 5})
    (request,) = double.requests
    system, asked = request["messages"]
    assert system == {"role": "system", "content": "You are strict."}
    assert all(f">\n{text}\n<" in asked["content"] for text in ("What is 2+2?", "4", "Four."))
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("tiny", 0.0, 5)


def test_a_template_of_ones_own() -> None:
    prompt: list[dict[str, Any]] = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": None}]
    outcome = Outcome("x" * 50 + "{text}", response="r", answer="4", row={"level": "easy"}, prompt=prompt)
    options = {"template": "{row[level]}|{prompt}|{text}|{response}|{{}}", "pattern": r"grade (-?\d)"}
    with serve(says("grade -1")) as double:
        assert judge(double, outcome, scale=(-2, 2), longest=8, **options) == 0.25
    asked = "easy|user: 2+2?\n\nassistant: |xx{text}|r|{}"
    assert double.requests[0]["messages"] == [{"role": "user", "content": asked}]


@pytest.mark.parametrize(
    ("answer", "options", "error", "words", "asked"),
    [
        (says("Hard to say.\n" * 1000), {}, NoVerdict, "no number from 0 to 10 in 3 replies; .*Hard to say", 3),
        (fails(500), {}, ChatUnavailable, "500", 2),
        (says("Score: 5"), {"template": "{row[author]} {text}"}, ValueError, "KeyError\\('author'\\)", 0),
    ],
)
def test_what_gives_no_number_is_an_error_never_a_zero(
    answer: Any, options: dict[str, Any], error: type[Exception], words: str, asked: int
) -> None:
    with serve(answer) as double:
        with pytest.raises(error, match=words):
            judge(double, **options)
        assert len(double.requests) == asked
