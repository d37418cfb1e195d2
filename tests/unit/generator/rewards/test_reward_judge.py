"""The judge: what is asked, which number counts, and endpoints that fail, which are never a reward."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from common.errors import UserError
from generator.chat_api import ChatUnavailable
from generator.rewards.judge import Judge, NoVerdict
from generator.rewards.outcome import Outcome
from tests.support.http_double import Double, fails, raw, says, serve

ASKED = Outcome("Four.", response="Let me see. Four.", answer="4", row={"level": "easy"}, prompt="What is 2+2?")


def judge(double: Double, outcome: Outcome = ASKED, **options: Any) -> float:
    async def scene() -> float:
        made = Judge(f"{double.url}/v1", "tiny", **({"backoff": 0.0, "attempts": 2} | options))
        try:
            return await made.score(outcome)
        finally:
            await made.close()

    return asyncio.run(scene())


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Score: 7", 0.7),
        ("It is wrong.\nscore: 0", 0.0),
        ("**Score:** 10", 1.0),
        ("At first Score: 2, but then\nScore: 7.5", 0.75),
        ("Score = 3 of 10", 0.3),
    ],
)
def test_the_last_number_counts_on_its_scale(reply: str, expected: float) -> None:
    with serve(says(reply)) as double:
        assert judge(double) == pytest.approx(expected)
    assert len(double.requests) == 1


def test_question_reference_and_answer_are_shown() -> None:
    with serve(says("Score: 1")) as double:
        judge(double, system="You are strict.", parameters={"max_tokens": 5})
    (request,) = double.requests
    system, asked = request["messages"]
    assert system == {"role": "system", "content": "You are strict."}
    assert all(f">\n{text}\n<" in asked["content"] for text in ("What is 2+2?", "4", "Four."))
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("tiny", 0.0, 5)


def test_a_template_of_ones_own() -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    outcome = Outcome("x" * 50 + "{text}", response="r", answer="4", row={"level": "easy"}, prompt=prompt)
    with serve(says("grade -1")) as double:
        value = judge(
            double, outcome, template="{row[level]}|{prompt}|{text}|{response}|{{}}", pattern=r"grade (-?\d)",
            scale=(-2, 2), longest=8,
        )  # fmt: skip
    assert double.requests[0]["messages"] == [
        {"role": "user", "content": "easy|system: Be brief.\n\nuser: 2+2?|xx{text}|r|{}"}
    ]
    assert value == 0.25


def test_a_reply_without_a_number_is_asked_for_again_and_then_an_error() -> None:
    with serve(says("Hard to say."), says("Score: 11"), says("Score: 4")) as double:
        assert judge(double) == pytest.approx(0.4)
        assert [request["temperature"] for request in double.requests] == [0.0, 1.0, 1.0]
    with serve(says("Hard to say.\n" * 1000)) as double:
        with pytest.raises(NoVerdict, match=r"no number from 0 to 10 in 3 replies; the last ended: .*Hard to say"):
            judge(double)
        assert len(double.requests) == 3


@pytest.mark.parametrize(
    "answer", [fails(500), fails(401), lambda handler, body: raw(handler, json.dumps({"choices": []}).encode())]
)
def test_an_endpoint_that_fails_is_an_error_and_never_a_zero(answer: Any) -> None:
    with serve(answer) as double, pytest.raises(ChatUnavailable):
        judge(double)


def test_an_endpoint_that_recovers_has_cost_nothing() -> None:
    with serve(fails(503), says("Score: 5")) as double:
        assert judge(double) == 0.5


def test_a_template_that_does_not_fit_the_row_is_an_error() -> None:
    with serve(says("Score: 5")) as double, pytest.raises(ValueError, match="KeyError\\('author'\\)"):
        judge(double, template="{row[author]} {text}")
    assert double.requests == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "("}, "regular expression"),
        ({"pattern": r"\d+"}, "no group"),
        ({"scale": (1, 1)}, "scale"),
        ({"scale": (1, 2, 3)}, "scale"),
        ({"tries": 0}, "tries"),
        ({"template": "{question}"}, r"\{question\} is unknown; allowed: prompt, text"),
        ({"template": "{text"}, "braces"),
        ({"template": "{}"}, "unknown"),
        ({"base_url": "127.0.0.1:8000"}, "http"),
        ({"api_key_env": "SURELY_NOT_SET_ANYWHERE"}, "SURELY_NOT_SET_ANYWHERE"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Judge(**({"base_url": "http://127.0.0.1:1", "model": "m"} | options))
