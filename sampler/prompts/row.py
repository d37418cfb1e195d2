"""A sequence of rows from any source, and the problems that a row may have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sampler.prompts.chat import Messages


class BadRow(Exception):
    """A row that cannot be used; the text says why.

    Attributes:
        problem: the kind of problem: `unreadable`, `prompt`, `answer`, `id`, `duplicate` or `template`.
        reason: the text without details that differ from row to row.
    """

    def __init__(self, text: str, problem: str = "unreadable", reason: str = "") -> None:
        super().__init__(text)
        self.problem, self.reason = problem, reason or text


@dataclass(slots=True)
class CheckedRow:
    """A row and its problem, if it has one.

    Attributes:
        number: position in the data.
        row: None if it cannot be read.
        prompt_id, prompt, answer: set if the row has no problem or is a duplicate.
        problem: why the row cannot be used; None if it can.
        earlier: of a duplicate, the number of the row with the same prompt or id.
    """

    number: int
    row: dict[str, Any] | None = None
    prompt_id: str = ""
    prompt: str | Messages = ""
    answer: Any = None
    problem: BadRow | None = None
    earlier: int | None = None


class Rows(ABC):
    """A sequence of rows that does not hold them as Python objects."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, i: int) -> dict[str, Any]:
        """Row i; raises `BadRow` if it cannot be read."""

    @abstractmethod
    def where(self, i: int) -> str:
        """File and line of row i, for messages."""

    def __iter__(self) -> Iterator[dict[str, Any] | BadRow]:
        return map(self.row_or_problem, range(len(self)))

    def row_or_problem(self, i: int) -> dict[str, Any] | BadRow:
        try:
            return self[i]
        except BadRow as problem:
            return problem
