"""What a quickstart's task is: problems, dialogues that show how to answer them, and a configuration."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common.errors import UserError

FOLDER = Path(__file__).parent
TRAIN_SIZE = 4096
HELDOUT_SIZE = 256


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of the data set.

    Attributes:
        columns: besides prompt and answer.
        solution: what its demonstrations are made of; stands in no file.
    """

    prompt: str
    answer: str
    columns: dict[str, Any] = field(default_factory=dict)
    solution: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {"prompt": self.prompt, "answer": self.answer, **self.columns}


@dataclass(frozen=True, slots=True)
class Turn:
    """What the assistant says in a demonstration, and what comes back.

    Attributes:
        said: without the end of the turn.
        then: the tool's result or the user's words; None behind the last turn.
        by: who says that.
        weight: of the turn's first token in the loss.
    """

    said: str
    then: str | None = None
    by: Literal["tool", "user"] = "tool"
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Of two ways to go on: how often the better one is practised, and how often the finished model will take it.

    Copying takes practice, yet the model shall not start as a master. Where the two ways differ in one token, the first
    of a turn, its weight in the loss makes up the difference.
    """

    practised: float
    taken: float

    def draw(self, rng: random.Random) -> tuple[bool, float]:
        """Whether it is the better way this time, and the weight of the token that decides it."""
        if rng.random() < self.practised:
            return True, self.taken / self.practised
        return False, (1 - self.taken) / (1 - self.practised)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the initial model is made from demonstrations; a change of any value makes a new one."""

    seed: int = 0
    steps: int = 300
    rows: int = 128  # conversations a step
    lr: float = 3e-3
    warmup: int = 30  # steps


@dataclass(frozen=True, slots=True)
class Room:
    """A task with all it needs; plain data and two functions.

    Attributes:
        name: of its module here and of its configuration beside it.
        summary: what the model learns, in a few words.
        problems: endless problems; they repeat in the long run.
        demonstrate: the turns of a conversation about a problem, mistakes included: what the initial model is taught.
        pieces: texts of this task that get a token of their own.
        call_format: of the configuration.
        uses: modules here, besides its own, that decide the initial model.
    """

    name: str
    summary: str
    problems: Callable[[random.Random], Iterator[Problem]]
    demonstrate: Callable[[Problem, random.Random], list[Turn]]
    pieces: tuple[str, ...] = ()
    call_format: str = "hermes"
    uses: tuple[str, ...] = ()
    recipe: Recipe = Recipe()

    @property
    def template(self) -> Path:
        """The run's configuration."""
        return FOLDER / f"{self.name}.yaml"

    @property
    def sources(self) -> list[Path]:
        """The files that decide its demonstrations."""
        return [FOLDER / f"{name}.py" for name in ("room", self.name, *self.uses)]

    def split(
        self, seed: int, train: int = TRAIN_SIZE, heldout: int = HELDOUT_SIZE
    ) -> tuple[list[Problem], list[Problem]]:
        """Two lists of different problems that share no prompt."""
        distinct: dict[str, Problem] = {}
        for problem in self.problems(random.Random(f"{self.name} {seed}")):
            distinct.setdefault(problem.prompt, problem)
            if len(distinct) == train + heldout:
                break
        rows = list(distinct.values())
        return rows[heldout:], rows[:heldout]


def write(problems: Iterable[Problem], path: Path) -> None:
    """Write problems as `.jsonl` or `.parquet`, by the name's ending; any other is a `UserError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = [problem.row() for problem in problems]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
    else:
        raise UserError(f"problems are written as .jsonl or .parquet, not as {path.name}")
