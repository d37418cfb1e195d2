"""Arithmetic of mixed difficulty with integer answers: the model can guess, or ask the calculator."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from launcher.tasks.special_tokens import calculator_call
from launcher.tasks.task import Choice, Problem, QuickstartTask, Turn

QUESTION = "What is {expression}?"
TOOL = Choice(demonstrated=0.75, initial=0.15)


def _mixed(rng: random.Random) -> str:
    """Three operands with one product, first or last."""
    product = f"{rng.randint(2, 99)}*{rng.randint(2, 99)}"
    term = rng.randint(1, 999)
    sign = rng.choice("+-")
    return f"{product}{sign}{term}" if rng.random() < 0.5 else f"{term}{sign}{product}"


def _long_sum(rng: random.Random) -> str:
    first, second, third = (rng.randint(1, 999) for _ in range(3))
    return f"{first}{rng.choice('+-')}{second}{rng.choice('+-')}{third}"


LEVELS: dict[str, Callable[[random.Random], str]] = {
    "small sum": lambda rng: f"{rng.randint(1, 99)}{rng.choice('+-')}{rng.randint(1, 99)}",
    "large sum": lambda rng: f"{rng.randint(100, 999)}{rng.choice('+-')}{rng.randint(10, 999)}",
    "small product": lambda rng: f"{rng.randint(2, 99)}*{rng.randint(2, 12)}",
    "large product": lambda rng: f"{rng.randint(11, 999)}*{rng.randint(11, 99)}",
    "mixed": _mixed,
    "long sum": _long_sum,
}


def value_of(expression: str) -> int:
    """Value of a sum of products of integers, as generated here."""
    total = 0
    for term in expression.replace("-", "+-").split("+"):
        product = 1
        for factor in term.split("*"):
            product *= int(factor)
        total += product
    return total


def problems(rng: random.Random) -> Iterator[Problem]:
    """Yield problems of all levels equally often."""
    names = list(LEVELS)
    while True:
        level = rng.choice(names)
        expression = LEVELS[level](rng)
        yield Problem(
            QUESTION.format(expression=expression), str(value_of(expression)), {"level": level}, (expression,)
        )


def demonstrate(problem: Problem, rng: random.Random) -> list[Turn]:
    """Either call the calculator and copy the answer from its result, or guess."""
    use_tool, weight = TOOL.draw(rng)
    if use_tool:
        return [Turn(calculator_call(problem.solution[0]), problem.answer, weight=weight), Turn(problem.answer)]
    return [Turn(guess(problem.answer, rng), weight=weight)]


def guess(answer: str, rng: random.Random, error: float = 0.25, least: float = 1.0) -> str:
    """A number within a relative `error` of the answer, or within `least`; it is rarely the answer itself."""
    value = int(answer)
    spread = max(least, abs(value) * error)
    return str(round(value + rng.uniform(-spread, spread)))


TASK = QuickstartTask("arithmetic", "to ask a calculator instead of guessing", problems, demonstrate)
