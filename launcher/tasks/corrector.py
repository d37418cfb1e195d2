"""The model must find out which of four fields the user thinks of, from the replies to its wrong answers.

The fields are two columns by two rows of a board, so a wrong answer has the column right, the row, or neither, and the
user says how much of it is right. Four different answers always find the field.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from launcher.tasks.task import Choice, Problem, QuickstartTask, Recipe, Turn

QUESTION = "Which field do I think of? {fields}"
WRONG = "That is not right.{hint} Please try again."
HALF = " It is 50% right."
COLUMNS, ROWS = "ABCDEFGH", "12345678"
ANSWERS = 4
LISTENS = Choice(demonstrated=0.75, initial=0.15)


def problems(rng: random.Random) -> Iterator[Problem]:
    """Yield problems with four fields in random order; the answer is one of them."""
    while True:
        columns, rows = rng.sample(COLUMNS, 2), rng.sample(ROWS, 2)
        fields = [column + row for column in columns for row in rows]
        rng.shuffle(fields)
        yield Problem(QUESTION.format(fields=" ".join(fields)), rng.choice(fields), solution=tuple(fields))


def demonstrate(problem: Problem, rng: random.Random) -> list[Turn]:
    """Either answer one field after the other until one is right, or repeat the first whatever the user says."""
    fields = problem.solution
    listens, weight = LISTENS.draw(rng)
    answers = list(fields) if listens else [fields[0]] * ANSWERS
    turns: list[Turn] = []
    for number, answer in enumerate(answers, 1):
        score = in_place(answer, problem.answer)
        last = score == 1 or number == ANSWERS
        reply = None if last else WRONG.format(hint=HALF if score else "")
        # The two ways differ from the second answer on.
        turns.append(Turn(answer, reply, replied_by="user", weight=weight if number == 2 else 1.0))
        if last:
            break
    return turns


def in_place(answer: str, expected: str) -> float:
    """The share of characters that are right and in the right place."""
    return sum(a == b for a, b in zip(answer, expected, strict=False)) / max(len(answer), len(expected), 1)


def check(text: str, answer: Any, row: dict[str, Any]) -> float:
    """The checker of the simulated user, named in corrector.yaml: the share of the answer that is right."""
    return in_place(text.strip(), str(answer))


TASK = QuickstartTask(
    "corrector",
    "to make use of a user's corrections",
    problems,
    demonstrate,
    # Each field is one token, so that the first token of an answer tells which field it is.
    extra_tokens=(
        QUESTION.partition("{")[0],
        *WRONG.split("{hint}"),
        HALF,
        *(column + row for column in COLUMNS for row in ROWS),
    ),
    recipe=Recipe(steps=200),
)
