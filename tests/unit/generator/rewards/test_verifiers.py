"""Answers compared by a library: what is equal, what is not, and answers made to hang the process that reads them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from generator.rewards import Outcome
from generator.rewards.registry import make_reward
from generator.rewards.verifiers import Maths, cpu_limit
from sampler.prompts.rows import open_rows


def score(text: str, answer: object, **options: float) -> float:
    return Maths(**options).score(Outcome(text, answer=answer))  # type: ignore[arg-type]


EQUAL = [
    (r"so \boxed{42}", 42),
    ("The answer is 42.", "42"),
    (r"\boxed{0.5}", r"\frac{1}{2}"),
    (r"$(x+1)^2$", "x^2+2x+1"),
    (r"$\{2, 1\}$", r"\{1, 2\}"),
    (r"\boxed{50\%}", "50%"),
    (r"\boxed{1{,}000}", "1000"),
    (r"\boxed{3}. No: \boxed{4}", "4"),
    (r"\boxed{3} is not it, $4$ neither. So $$\boxed{\frac{1}{2}}$$", "1/2"),
    ("first $3$, but then $4$", "4"),
]
# Reference answers as people write them, an answer that is right, and one that is wrong.
WRITTEN = [
    ("34.", "34", "3.4"),
    ("34.", "34.", "35."),
    ("0.5.", "1/2", "5"),
    ("1e3", "1000", "13"),
    ("2.5e-3", "0.0025", "2.5"),
    ("1000", "1e3", "1e2"),
    (r"\$18", "18", "81"),
    (r"\$18.50", "18.5", "18"),
    ("18", r"\$18", r"\$19"),
    ("$1,250.50", "1250.5", "1250"),
    ("€7", "7", "17"),
    ("-$3", "-3", "3"),
    ("2 1/3", r"\frac73", "2/3"),
    ("2 1/3", r"2\frac{1}{3}", "21/3"),
    ("-1 1/2", "-1.5", "-0.5"),
    ("7/3", "2 1/3", "3 1/3"),
    ("15 dollars", "15", "51"),
    ("15 dollars", "15 dollars", "15 cents"),
    ("15 dollars", r"15\text{ dollars}", r"15\text{ cents}"),
    ("15", "15 dollars", "16 dollars"),
    ("34 apples", "34", "34 pears"),
    ("1 hour", "1 hour", "1 minute"),
    ("40 miles per hour", "40", "14"),
    ("12 units^2", "12", "144"),
    ("12 square units", "12", "144"),
    ("15 (fifteen)", "15", "50"),
    ("１２", "12", "21"),
    ("3:30", "3{:}30", "4:30"),
    ("Answer: 15", "15", "1"),
    ("The answer is 34", "34", "3"),
    ("The answer is 34", "The answer is 34", "The answer is 43"),
    ("The total is $12 + 3 = 15$.", "15", "12"),
    ("There are 12 + 3 = 15.", "15", "3"),
    (r"The value is \boxed{12}.", "12", "21"),
    ("He has 3 left.\n#### 60", "60", "3"),
    ("2x + 3y = 6", "3y + 2x = 6", "6"),
    ("5 minutes and 30 seconds", "5 minutes and 30 seconds", "5"),
    ("3 million", "3 million", "3"),
    ("5 or 6", "5 or 6", "5"),
    ("3,5", "5, 3", "3.5"),
    ("1/2 or 0.5", "1/2", "1/4"),
    ("no solution", r"\text{no solution}", "0"),
    ("073", "73", "37"),
    ("12_5", "12_{5}", "21"),
    (r"12.5\%", "12.5", "1.25"),
    ("12.5", r"12.5\%", r"1.25\%"),
    (r"12.5\%", "0.125", r"0.125\%"),
    ("5 cm", "5", "5 m"),
    ("5 cm", "5 centimeters", "5 kg"),
    ("5 s", r"5\text{ seconds}", "5 m"),
    ("30 min", "30 minutes", "30 s"),
    ("3 lbs", "3 pounds", "3 oz"),
    ("6 feet", "6 ft", "6 inches"),
    (r"12 \text{ cm}^2", "12 cm^2", "12 cm^3"),
    ("5 m/s", "5", "5 km/h"),
    ("40 miles per hour", "40 mph", "40 km/h"),
    ("10 dollars", "10 USD", "10 euros"),
    (r"\text{45 degrees}", "45", "54"),
    (r"1\,000", "1000", "1"),
    ("US$5", "5", "50"),
    ("5 €", "5", "50"),
    ("6.02e23", r"6.02 \times 10^{23}", r"6.02 \times 10^{22}"),
    ("5m", "5 m", "5n"),
]


@pytest.mark.parametrize(("answer", "right", "wrong"), WRITTEN)
def test_references_are_read_as_people_write_them(answer: str, right: str, wrong: str) -> None:
    assert [score(rf"\boxed{{{text}}}", answer) for text in (right, wrong)] == [1.0, 0.0]


NUMBERS = st.integers(-999, 999).map(str) | st.decimals(-99, 99, places=2).map(str)
UNITS = st.sampled_from(
    ["{}", "{}.", r"\${}", "{} dollars", "{} units^2", "{} (about)", "The answer is {}.", "#### {}"]
)


@given(gold=NUMBERS, answer=NUMBERS, how=UNITS, its=UNITS)
@settings(max_examples=60, deadline=None)
def test_only_the_same_number_is_right_however_both_are_written(gold: str, answer: str, how: str, its: str) -> None:
    text = rf"\boxed{{{its.format(answer)}}}"
    same_unit = how == its or not (("dollar" in how and "units" in its) or ("units" in how and "dollar" in its))
    assert score(text, how.format(gold)) == float(float(gold) == float(answer) and same_unit)


OTHER = [("", "42"), ("I do not know", "42"), (r"\boxed{3} or \boxed{4}", "3"), (r"\boxed{(2, 1)}", "(1,2)"),
         (r"\boxed{42", "43"), (r"\boxed{}", "0"), ("\x00\x07\ufffd\u202e", "1")]  # fmt: skip


@pytest.mark.parametrize(("text", "answer"), [*EQUAL, *OTHER])
def test_answers_are_compared_as_mathematics(text: str, answer: object) -> None:
    assert score(text, answer) == ((text, answer) in EQUAL)


@pytest.mark.integration
@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n!!}}",
        r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
        "\\begin{pmatrix}" * 5000,
    ],
)
def test_an_answer_that_takes_too_long_is_wrong(text: str) -> None:
    assert score(text, "10", seconds=0.3) == 0


def test_what_the_model_wrote_is_never_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    system = f"__import__('os').system('touch {trace}')"
    for text in (system, f"final answer is: 1+{system}", rf"\boxed{{{system}}}", f"$open('{trace}', 'w')$"):
        assert score(text, "10") == 0
    assert not trace.exists()


@pytest.mark.parametrize("answer", ["", "(" * 3000 + "1" + ")" * 3000], ids=["no mathematics", "too long"])
def test_a_reference_that_cannot_be_read_is_an_error(answer: str) -> None:
    with pytest.raises(ValueError, match="reference answer"):
        score(r"\boxed{1}", answer, seconds=0.3)


@pytest.mark.integration
def test_a_limit_of_processor_time_leaves_no_timer() -> None:
    caught = 0

    def work() -> None:
        nonlocal caught
        while True:
            try:
                while True:
                    pass
            except BaseException:  # one that is swallowed comes again
                caught += 1
                if caught == 2:
                    raise

    assert cpu_limit(0.05, work) is None
    assert caught == 2
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) is signal.SIG_DFL


def test_a_signal_while_the_timer_is_stopped_does_not_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, late = signal.setitimer, [signal.SIGPROF]

    def setitimer(which: int, seconds: float, interval: float = 0.0) -> None:
        if seconds == 0 and late:
            signal.raise_signal(late.pop())
        stop(which, seconds, interval)

    monkeypatch.setattr(signal, "setitimer", setitimer)
    assert cpu_limit(100.0, lambda: 7) == 7
    assert late == []
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) is signal.SIG_DFL


# Tasks of reasoning-gym: the family's verifier, and nothing less than its full score.


def task(family: str, **options: Any) -> dict[str, Any]:
    return open_rows(f"reasoning_gym:{family}", "train", options)[0]


def gym(row: dict[str, Any], text: str, **options: Any) -> float:
    columns = {name: value for name, value in row.items() if name not in ("prompt", "answer")}
    return make_reward("reasoning_gym", options).score(Outcome(text, answer=row.get("answer"), row=columns))


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (" {}\n", {}, 1.0),
        ("{}7", {}, 0.0),
        ("It is {}.", {}, 0.0),
        ("2 + 2 ... <answer> {} </answer>", {}, 1.0),
        ("<answer>-1</answer> no: <answer>{}</answer> so be it", {}, 1.0),
        ("<answer>{}", {}, 0.0),
        ("The numbers 1 and 2 make {}.", {"pattern": r"(-?\d+)"}, 1.0),
        ("{}", {"pattern": "never (this)"}, 1.0),
        ("<answer>{}</answer>", {"pattern": None}, 0.0),
    ],
)
def test_the_whole_answer_alone_is_worth_one(text: str, options: dict[str, Any], expected: float) -> None:
    row = task("chain_sum", min_terms=4, min_digits=3)
    assert gym(row, text.format(row["answer"]), **options) == expected
    if text.startswith("It is"):
        assert 0.0 < gym(row, text.format(row["answer"]), partial=True) < 1.0


def test_any_answer_that_the_verifier_accepts_counts() -> None:
    row = task("prime_factorization", min_value=12, max_value=12)
    assert row["answer"] == "2 × 2 × 3"
    assert gym(row, "3×2×2") == 1.0
    row = task("countdown")
    assert gym(row, row["answer"]) == gym(row, f"({row['answer']})") == 1.0


@pytest.mark.parametrize("text", ["9**9**9**9", "exec('raise SystemExit')", "(" * 5000, "1/0", "\x00"])
def test_what_a_verifier_would_evaluate_is_wrong(text: str) -> None:
    assert gym(task("countdown"), text) == 0.0


@pytest.mark.integration
def test_an_answer_that_takes_long_to_verify_is_wrong() -> None:
    assert gym(task("coin_flip"), "1e-999999999", seconds=0.2) == 0.0


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "no `family` and `entry`"),
        ({"family": "chain_sum", "entry": {"answer": "1"}}, "no `family` and `entry`"),
        ({"family": "chain_sun", "entry": json.dumps({"answer": "1"})}, "no family 'chain_sun'"),
    ],
)
def test_a_row_of_something_else_is_an_error(row: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, UserError), match=words):
        gym(row, "1")
