"""Rewards by rule, and answers compared by a library, some of which are made to hang the process that reads them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from generator.rewards import Outcome
from generator.rewards.quantities import plain
from generator.rewards.registry import make_reward
from generator.rewards.rules import Boxed, BoxedThink, Exact, Format, Length, Overlong, last_boxed
from generator.rewards.verifiers import Maths, cpu_limit
from sampler.prompts.rows import open_rows
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
    assert wanted.in_pool == ("pattern" in options)  # a pattern may backtrack for hours


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
def test_format_sees_tags_that_the_template_has_opened(options: Any, opened: str, response: str, expected: float):
    assert Format(**options).score(Outcome(response, response=response, opened=opened)) == expected


def outcome(tokens: int, limit: int = 20_480) -> Outcome:
    return Outcome("", tokens=tokens, limit=limit)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(16_384, 0), (16_385, -1 / 4096), (18_432, -0.5), (20_480, -1), (20_481, -1)]
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
    (r"\boxed{3} is not it, $4$ neither. So $$\boxed{\frac{1}{2}}$$", "1/2"),
    ("first $3$, but then $4$", "4"),
]
# Reference answers as people write them, an answer that is right, and one that is wrong.
WRITTEN = [
    ("34.", "34", "3.4"),
    ("1000", "1e3", "1e2"),
    (r"\$18", "18", "81"),
    ("2 1/3", r"\frac73", "2/3"),
    ("15 dollars", r"15\text{ dollars}", r"15\text{ cents}"),
    ("12 square units", "12", "144"),
    ("１２", "12", "21"),
    ("3:30", "3{:}30", "4:30"),
    ("The answer is 34", "34", "3"),
    ("The total is $12 + 3 = 15$.", "15", "12"),
    ("He has 3 left.\n#### 60", "60", "3"),
    ("3 million", "3 million", "3"),
    ("5 or 6", "5 or 6", "5"),
    ("no solution", r"\text{no solution}", "0"),
    (r"12.5\%", "0.125", r"0.125\%"),
    ("5 cm", "5 centimeters", "5 kg"),
    (r"12 \text{ cm}^2", "12 cm^2", "12 cm^3"),
    ("40 miles per hour", "40 mph", "40 km/h"),
    (r"\text{45 degrees}", "45", "54"),
    (r"1\,000", "1000", "1"),
    ("5 €", "5", "50"),
    ("6.02e23", r"6.02 \times 10^{23}", r"6.02 \times 10^{22}"),
]


@pytest.mark.parametrize(("answer", "right", "wrong"), WRITTEN)
def test_references_are_read_as_people_write_them(answer: str, right: str, wrong: str) -> None:
    assert [score(rf"\boxed{{{text}}}", answer) for text in (right, wrong)] == [1.0, 0.0]


OTHER = [("", "42"), ("I do not know", "42"), (r"\boxed{3} or \boxed{4}", "3"), (r"\boxed{(2, 1)}", "(1,2)")]
OTHER += [(r"\boxed{42", "43"), (r"\boxed{}", "0"), ("\x00\x07\ufffd\u202e", "1")]


@pytest.mark.parametrize(("text", "answer"), [*EQUAL, *OTHER])
def test_answers_are_compared_as_mathematics(text: str, answer: object) -> None:
    assert score(text, answer) == ((text, answer) in EQUAL)


@pytest.mark.integration
@pytest.mark.parametrize("text", [r"\boxed{9^{9^{9^{9}}}}", "\\begin{pmatrix}" * 5000])
def test_an_answer_that_takes_too_long_is_wrong(text: str) -> None:
    assert score(text, "10", seconds=0.3) == 0


def test_what_the_model_wrote_is_never_run(tmp_path: Path) -> None:
    system = f"__import__('os').system('touch {tmp_path / 'trace'}')"
    for text in (system, f"final answer is: 1+{system}", rf"\boxed{{{system}}}"):
        assert score(text, "10") == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("answer", ["", "(" * 3000 + "1" + ")" * 3000], ids=["no mathematics", "too long"])
def test_a_reference_that_cannot_be_read_is_an_error(answer: str) -> None:
    with pytest.raises(ValueError, match="reference answer"):
        score(r"\boxed{1}", answer, seconds=0.3)


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
        ("The numbers 1 and 2 make {}.", {"pattern": r"(-?\d+)"}, 1.0),
        ("<answer>{}</answer>", {"pattern": None}, 0.0),
    ],
)
def test_the_whole_answer_alone_is_worth_one(text: str, options: dict[str, Any], expected: float) -> None:
    row = task("chain_sum", min_terms=4, min_digits=3)
    assert gym(row, text.format(row["answer"]), **options) == expected
    if text.startswith("It is"):
        assert 0.0 < gym(row, text.format(row["answer"]), partial=True) < 1.0


def test_any_answer_that_the_verifier_accepts_counts_and_nothing_is_evaluated() -> None:
    row = task("prime_factorization", min_value=12, max_value=12)
    assert (row["answer"], gym(row, "3×2×2")) == ("2 × 2 × 3", 1.0)
    for text in ("9**9**9**9", "exec('raise SystemExit')", "(" * 5000):
        assert gym(task("countdown"), text) == 0.0
    assert gym(task("coin_flip"), "1e-999999999", seconds=0.2) == 0.0, "it takes long"
    with pytest.raises(ValueError, match="no `family` and `entry`"):
        gym({}, "1")
    with pytest.raises(UserError, match="no family 'chain_sun'"):
        gym({"family": "chain_sun", "entry": json.dumps({"answer": "1"})}, "1")


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


def test_a_number_with_an_endless_exponent_is_wrong_and_no_error() -> None:
    for exponent in ("9" * 22, "-" + "9" * 22, "9" * 5000):
        assert plain(f"1e{exponent}") == (f"1e{exponent}", "")
