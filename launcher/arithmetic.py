"""The quickstart's problems: generated arithmetic of mixed difficulty, with exact integer answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import UserError

QUESTION = "What is {expression}?"
TRAIN_SIZE = 4096
HELDOUT_SIZE = 256


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of the data set: the question, its answer as text, and what kind of problem it is."""

    prompt: str
    answer: str
    level: str

    @property
    def expression(self) -> str:
        """What stands between the question's words."""
        before, after = QUESTION.split("{expression}")
        return self.prompt[len(before) : -len(after)]


def _small_sum(rng: random.Random) -> str:
    return f"{rng.randint(1, 99)}{rng.choice('+-')}{rng.randint(1, 99)}"


def _large_sum(rng: random.Random) -> str:
    return f"{rng.randint(100, 999)}{rng.choice('+-')}{rng.randint(10, 999)}"


def _small_product(rng: random.Random) -> str:
    return f"{rng.randint(2, 99)}*{rng.randint(2, 12)}"


def _large_product(rng: random.Random) -> str:
    return f"{rng.randint(11, 999)}*{rng.randint(11, 99)}"


def _mixed(rng: random.Random) -> str:
    """Three operands: the product binds first, wherever it stands."""
    product = f"{rng.randint(2, 99)}*{rng.randint(2, 99)}"
    term = rng.randint(1, 999)
    sign = rng.choice("+-")
    return f"{product}{sign}{term}" if rng.random() < 0.5 else f"{term}{sign}{product}"


def _long_sum(rng: random.Random) -> str:
    first, second, third = (rng.randint(1, 999) for _ in range(3))
    return f"{first}{rng.choice('+-')}{second}{rng.choice('+-')}{third}"


LEVELS: dict[str, Callable[[random.Random], str]] = {
    "small sum": _small_sum,
    "large sum": _large_sum,
    "small product": _small_product,
    "large product": _large_product,
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
    """Endless problems, every level as often as the others; they repeat in the long run."""
    names = list(LEVELS)
    while True:
        level = rng.choice(names)
        expression = LEVELS[level](rng)
        yield Problem(QUESTION.format(expression=expression), str(value_of(expression)), level)


def split(seed: int, train: int = TRAIN_SIZE, heldout: int = HELDOUT_SIZE) -> tuple[list[Problem], list[Problem]]:
    """Two lists of different problems that share none."""
    distinct: dict[str, Problem] = {}
    for problem in problems(random.Random(f"arithmetic {seed}")):
        distinct.setdefault(problem.prompt, problem)
        if len(distinct) == train + heldout:
            break
    rows = list(distinct.values())
    return rows[heldout:], rows[:heldout]


def write(rows: Iterable[Problem], path: Path) -> None:
    """Write problems as `.jsonl` or `.parquet`, by the name's ending; any other is a `UserError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = [asdict(row) for row in rows]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
    else:
        raise UserError(f"problems are written as .jsonl or .parquet, not as {path.name}")
