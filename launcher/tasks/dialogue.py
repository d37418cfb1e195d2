"""A question and one or two follow-up questions about the last result; the model has a calculator and must listen."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from launcher.tasks.arithmetic import LEVELS, QUESTION, guess
from launcher.tasks.special_tokens import calculator_call
from launcher.tasks.task import Choice, Problem, QuickstartTask, Turn

TOOL = Choice(demonstrated=0.85, initial=0.4)
FORGETFUL = 0.4  # share of later calls that begin with the question's first number instead of the last result
FIRST = ("small sum", "large sum", "small product")
LINES = {"+": "Now add {number}.", "-": "Now take away {number}.", "*": "Now multiply by {number}."}


def problems(rng: random.Random) -> Iterator[Problem]:
    """Yield problems with the user's lines in column `dialogue`; the answer is that to the last line."""
    while True:
        expression = LEVELS[rng.choice(FIRST)](rng)
        value, steps, lines = _value(expression), [], []
        for _ in range(rng.randint(1, 2)):
            sign = rng.choice(list(LINES))
            number = rng.randint(2, 9) if sign == "*" else rng.randint(2, 99)
            steps.append(f"{sign}{number}")
            lines.append(LINES[sign].format(number=number))
            value = _value(value + steps[-1])
        yield Problem(QUESTION.format(expression=expression), value, {"dialogue": lines}, (expression, *steps))


def demonstrate(problem: Problem, rng: random.Random) -> list[Turn]:
    """Answer each question by the calculator or by a guess; some calls do not start from the last result."""
    expression, *steps = problem.solution
    lines: list[str | None] = [*problem.columns["dialogue"], None]
    number = re.match(r"\d+", expression)
    assert number is not None
    turns: list[Turn] = []
    for line, step in zip(lines, [*steps, ""], strict=True):
        answer = _value(expression)
        use_tool, weight = TOOL.draw(rng)
        if use_tool:
            turns.append(Turn(calculator_call(expression), answer, weight=weight))
            weight = 1.0
        else:
            answer = guess(answer, rng)
        turns.append(Turn(answer, line, replied_by="user", weight=weight))
        expression = (number.group() if rng.random() < FORGETFUL else answer) + step
    return turns


def _value(expression: str) -> str:
    # Imported here, since most of the command line works without the generator's packages.
    from generator.tools.calculator import calculate

    return str(int(calculate(expression)))


TASK = QuickstartTask(
    "dialogue",
    "to follow a scripted user from result to result, with a calculator",
    problems,
    demonstrate,
    extra_tokens=tuple(line.partition("{")[0] for line in LINES.values()),
    source_modules=("arithmetic",),
)
