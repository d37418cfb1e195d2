"""Semantic maths: what is equal, what is not, and answers made to hang the one who reads them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from common.errors import UserError
from generator.rewards.outcome import Outcome
from generator.rewards.verifiers import Maths, cpu_limit


def score(text: str, answer: object, **options: float) -> float:
    return Maths(**options).score(Outcome(text, answer=answer))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}", "42"),
        (r"so \boxed{42}", 42),
        ("The answer is 42.", "42"),
        (r"\boxed{\frac12}", "0.5"),
        (r"\boxed{0.5}", r"\frac{1}{2}"),
        ("$1/2$", r"$\frac{1}{2}$"),
        (r"\boxed{1 + x}", "x+1"),
        (r"$(x+1)^2$", "x^2+2x+1"),
        (r"$\{2, 1\}$", r"\{1, 2\}"),
        (r"\boxed{(1, 2)}", "(1,2)"),
        (r"\boxed{50\%}", "50%"),
        (r"\boxed{1{,}000}", "1000"),
        (r"\boxed{3}. No: \boxed{4}", "4"),
        (r"\boxed{3} is not it, $4$ neither. So $$\boxed{\frac{1}{2}}$$", "1/2"),
        ("first $3$, but then $4$", "4"),
    ],
)
def test_equal_answers(text: str, answer: object) -> None:
    assert score(text, answer) == 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", "42"),
        ("I do not know", "42"),
        (r"\boxed{3} or \boxed{4}", "3"),
        (r"\boxed{41}", "42"),
        (r"\boxed{(2, 1)}", "(1,2)"),
        (r"\boxed{x}", "y"),
        (r"\boxed{42", "43"),
        (r"\boxed{}", "0"),
        (r"\boxed{\undefined{\frac{}}}", "1"),
        ("\x00\x07\ufffd\u202e", "1"),
    ],
)
def test_other_answers(text: str, answer: object) -> None:
    assert score(text, answer) == 0


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{(10^{9})!}",
        r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n!!}}",
        r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
        r"\boxed{" + "{" * 100_000,
        r"\boxed{" + "1" * 200_000 + "}",
        "$" * 100_000,
        "\\begin{pmatrix}" * 5000,
    ],
)
def test_an_answer_that_cannot_be_compared_in_time_is_wrong(text: str) -> None:
    assert score(text, "10", seconds=0.3) == 0


def test_what_the_model_wrote_is_never_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for text in (
        f"__import__('os').system('touch {trace}')",
        f"final answer is: 1+__import__('os').system('touch {trace}')",
        rf"\boxed{{__import__('os').system('touch {trace}')}}",
        f"$open('{trace}', 'w')$",
    ):
        assert score(text, "10") == 0
    assert not trace.exists()


def test_a_reference_that_is_no_mathematics_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="reference answer"):
        score(r"\boxed{1}", "")


def test_a_reference_that_cannot_be_read_in_time_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="reference answer"):
        score(r"\boxed{1}", "(" * 3000 + "1" + ")" * 3000, seconds=0.3)


def test_a_limit_of_processor_time_leaves_no_timer_behind() -> None:
    done = False
    with cpu_limit(0.05):
        while True:
            pass
    with cpu_limit(10.0):
        done = True
    assert done
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) is signal.SIG_DFL


def test_a_swallowed_limit_comes_again() -> None:
    caught = 0
    with cpu_limit(0.05):
        while True:
            try:
                while True:
                    pass
            except BaseException:
                caught += 1
                if caught == 2:
                    raise
    assert caught == 2


def test_no_time_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="seconds"):
        Maths(seconds=0)
