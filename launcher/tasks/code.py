"""Questions that a line of Python answers: the model can guess, or write a program and read its output."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass

from launcher.tasks.arithmetic import guess
from launcher.tasks.special_tokens import CODE_END, CODE_START, code_call
from launcher.tasks.task import Choice, Problem, QuickstartTask, Turn

CODE = Choice(demonstrated=0.8, initial=0.4)
MISTAKEN = 0.5  # share of demonstrated programs that are wrong

Numbers = dict[str, int]


@dataclass(frozen=True, slots=True)
class Kind:
    """Questions of one kind; the first program answers them, the others run but are wrong."""

    question: str
    numbers: Callable[[random.Random], Numbers]
    programs: tuple[str, ...]


def _divided(rng: random.Random) -> Numbers:
    common = rng.randint(2, 40)
    return {"a": common * rng.randint(2, 24), "b": common * rng.randint(2, 24)}


KINDS = {
    "digit sum": Kind(
        "What is the digit sum of {a}?",
        lambda rng: {"a": rng.randint(100, 99_999)},
        ('print(sum(map(int, "{a}")))', 'print(len("{a}"))', "print({a} % 10)"),
    ),
    "series": Kind(
        "What is the sum of all numbers from {a} to {b}?",
        lambda rng: {"a": rng.randint(1, 99), "b": rng.randint(100, 499)},
        ("print(sum(range({a}, {b} + 1)))", "print(sum(range({a}, {b})))", "print(sum([{a}, {b}]))"),
    ),
    "divisors": Kind(
        "How many divisors has {a}?",
        lambda rng: {"a": rng.randint(10, 2999)},
        (
            "print(sum({a} % i == 0 for i in range(1, {a} + 1)))",
            "print(sum({a} % i == 0 for i in range(1, {a})))",
            "print(sum(i for i in range(1, {a}) if {a} % i == 0))",
        ),
    ),
    "power": Kind(
        "What is {a} to the power of {b}, modulo {c}?",
        lambda rng: {"a": rng.randint(2, 99), "b": rng.randint(3, 99), "c": rng.randint(100, 999)},
        ("print({a} ** {b} % {c})", "print({a} ^ {b} % {c})", "print({a} * {b} % {c})"),
    ),
    "common divisor": Kind(
        "What is the greatest common divisor of {a} and {b}?",
        _divided,
        ("import math\nprint(math.gcd({a}, {b}))", "import math\nprint(math.lcm({a}, {b}))", "print({a} // {b})"),
    ),
    "binary": Kind(
        "What is {a} in binary?",
        lambda rng: {"a": rng.randint(32, 4095)},
        ('print(format({a}, "b"))', "print(bin({a}))", 'print(format({a}, "o"))'),
    ),
}


def problems(rng: random.Random) -> Iterator[Problem]:
    """Yield problems of all kinds equally often; the answer is the output of the kind's first program."""
    names = list(KINDS)
    while True:
        name = rng.choice(names)
        kind = KINDS[name]
        numbers = kind.numbers(rng)
        programs = tuple(program.format(**numbers) for program in kind.programs)
        yield Problem(kind.question.format(**numbers), printed(programs[0]), {"level": name}, programs)


def demonstrate(problem: Problem, rng: random.Random) -> list[Turn]:
    """Either run a program, right or wrong, and copy the answer from its output, or guess."""
    use_code, weight = CODE.draw(rng)
    if not use_code:
        return [Turn(guess(problem.answer, rng, error=0.5, least=5.0), weight=weight)]
    right, *wrong = problem.solution
    program = rng.choice(wrong) if rng.random() < MISTAKEN else right
    output = printed(program)
    return [Turn(code_call(program), output, weight=weight), Turn(output)]


def printed(program: str) -> str:
    """The output of one of the programs above, which are safe to run here; a model's programs run in the sandbox."""
    output = io.StringIO()
    with redirect_stdout(output):
        exec(program, {})
    return output.getvalue().rstrip("\n")


WORDS = {part for kind in KINDS.values() for part in re.split(r"\{.\}", kind.question) if len(part) > 1}
TASK = QuickstartTask(
    "code",
    "to answer by short Python programs, run in the local sandbox",
    problems,
    demonstrate,
    extra_tokens=(CODE_START, CODE_END, "<interpreter>\n", "\n</interpreter>\n\n", *sorted(WORDS)),
    call_format="code",
    source_modules=("arithmetic",),
)
