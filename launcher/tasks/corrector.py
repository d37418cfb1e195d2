"""Which of four fields the user thinks of: nothing tells but what he says of a wrong one.

The fields are two columns by two rows of a board, so a wrong one has its column right, its row, or neither, and the
user says how much of it is right. Four answers always find the field, if none of them is given twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from launcher.tasks.room import Choice, Problem, Recipe, Room, Turn

QUESTION = "Which field do I think of? {fields}"
WRONG = "That is not right.{finding} Please try again."
HALF = " It is 50% right."
COLUMNS, ROWS = "ABCDEFGH", "12345678"
ANSWERS = 4
LISTENS = Choice(practised=0.75, taken=0.15)


def problems(rng: random.Random) -> Iterator[Problem]:
    """Four fields in any order, and the one that is meant."""
    while True:
        columns, rows = rng.sample(COLUMNS, 2), rng.sample(ROWS, 2)
        fields = [column + row for column in columns for row in rows]
        rng.shuffle(fields)
        yield Problem(QUESTION.format(fields=" ".join(fields)), rng.choice(fields), solution=tuple(fields))


def demonstrate(problem: Problem, rng: random.Random) -> list[Turn]:
    """One field after the other until one is right; or the first again and again, whatever the user says."""
    fields = problem.solution
    listens, weight = LISTENS.draw(rng)
    answers = list(fields) if listens else [fields[0]] * ANSWERS
    turns: list[Turn] = []
    for number, said in enumerate(answers, 1):
        right = in_place(said, problem.answer)
        last = right == 1 or number == ANSWERS
        then = None if last else WRONG.format(finding=HALF if right else "")
        # The second answer shows which way it is.
        turns.append(Turn(said, then, by="user", weight=weight if number == 2 else 1.0))
        if last:
            break
    return turns


def in_place(said: str, meant: str) -> float:
    """Part of the characters that are right and in their place."""
    return sum(a == b for a, b in zip(said, meant, strict=False)) / max(len(said), len(meant), 1)


def check(text: str, answer: Any, row: dict[str, Any]) -> float:
    """How right a field is: the user's checker, as the configuration names it."""
    return in_place(text.strip(), str(answer))


ROOM = Room(
    "corrector",
    "to make use of a user's corrections",
    problems,
    demonstrate,
    # One token a field: the first token of an answer must tell which it is.
    pieces=(
        QUESTION.partition("{")[0],
        *WRONG.split("{finding}"),
        HALF,
        *(column + row for column in COLUMNS for row in ROWS),
    ),
    recipe=Recipe(steps=200),
)
