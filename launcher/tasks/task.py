"""A task of the quickstart: problems, demonstrations of how to answer them, and a configuration."""

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
        columns: further columns of the row.
        solution: the parts of its demonstrations, which are not written to the file.
    """

    prompt: str
    answer: str
    columns: dict[str, Any] = field(default_factory=dict)
    solution: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "answer": self.answer, **self.columns}


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the assistant in a demonstration, and the reply to it.

    Attributes:
        content: without the token that ends the turn.
        reply: the tool's result or the user's message; None after the last turn.
        replied_by: the role that replies.
        weight: weight of the turn's first token in the loss.
    """

    content: str
    reply: str | None = None
    replied_by: Literal["tool", "user"] = "tool"
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The share of demonstrations that take the better of two ways, and the initial model's probability of taking it.

    The model needs many demonstrations to learn the better way, but should take it rarely before RL. The two ways
    differ in one token, the first of a turn; that token's weight in the loss makes up the difference.
    """

    demonstrated: float
    initial: float

    def draw(self, rng: random.Random) -> tuple[bool, float]:
        """Whether to demonstrate the better way this time, and the weight of the token in which the ways differ."""
        if rng.random() < self.demonstrated:
            return True, self.initial / self.demonstrated
        return False, (1 - self.initial) / (1 - self.demonstrated)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the initial model is made.

    Attributes:
        experts: experts per layer, of which each token uses two; 0: a dense model.
    """

    seed: int = 0
    experts: int = 0
    steps: int = 300
    rows: int = 128  # conversations a step
    lr: float = 3e-3
    warmup: int = 30  # steps


@dataclass(frozen=True, slots=True)
class QuickstartTask:
    """A task of the quickstart: plain data and two functions.

    Attributes:
        name: name of its module in this folder, and of its configuration.
        summary: what the model learns, in a few words.
        problems: yields problems without end; they may repeat.
        demonstrate: makes the turns of a conversation about a problem, sometimes with mistakes.
        extra_tokens: texts of this task that get a token of their own.
        call_format: `episode.call_format` of the configuration.
        source_modules: modules in this folder, besides the task's own, on which the demonstrations depend.
        model_of: name of a task with the same demonstrations, whose initial model this one takes; empty: its own.
    """

    name: str
    summary: str
    problems: Callable[[random.Random], Iterator[Problem]]
    demonstrate: Callable[[Problem, random.Random], list[Turn]]
    extra_tokens: tuple[str, ...] = ()
    call_format: str = "hermes"
    source_modules: tuple[str, ...] = ()
    model_of: str = ""
    recipe: Recipe = Recipe()

    @property
    def template(self) -> Path:
        return FOLDER / f"{self.name}.yaml"

    @property
    def model(self) -> str:
        """Name of the task that its initial model is trained for."""
        return self.model_of or self.name

    @property
    def sources(self) -> list[Path]:
        """The files on which its demonstrations depend."""
        return [FOLDER / f"{name}.py" for name in ("task", "special_tokens", self.model, *self.source_modules)]

    def split(
        self, seed: int, train: int = TRAIN_SIZE, heldout: int = HELDOUT_SIZE
    ) -> tuple[list[Problem], list[Problem]]:
        """Lists of training and held-out problems, in which no prompt occurs twice."""
        distinct: dict[str, Problem] = {}
        for problem in self.problems(random.Random(f"{self.name} {seed}")):
            distinct.setdefault(problem.prompt, problem)
            if len(distinct) == train + heldout:
                break
        rows = list(distinct.values())
        return rows[heldout:], rows[:heldout]


def write(problems: Iterable[Problem], path: Path) -> None:
    """Write problems as `.jsonl` or `.parquet`, by the file name; raises `UserError` for any other suffix."""
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
