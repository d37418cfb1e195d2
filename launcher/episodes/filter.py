"""Which episodes to list, as the options of `spo episodes` say."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from launcher.episodes.rows import EpisodeRow

_COMPARISON = re.compile(r"\s*(<=|>=|==|=|!=|<|>)?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*", re.IGNORECASE)
_STEPS = re.compile(r"(\d+)(?:-(\d+))?")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
# Each with how to sort by it; what has no reward comes last, whichever way round.
SORTS: dict[str, Callable[[EpisodeRow], Any]] = {
    "step": lambda row: row.step,
    "reward": lambda row: row.reward,
    "turns": lambda row: row.turns,
    "tokens": lambda row: row.tokens,
    "seconds": lambda row: row.seconds,
    "prompt": lambda row: row.prompt_id,
}


@dataclass(frozen=True, slots=True)
class Filter:
    """All of these must hold; None (or False) asks for nothing."""

    reward: str | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    prompt: str | None = None
    reason: str | None = None
    step: str | None = None
    error: bool = False

    def test(self) -> Callable[[EpisodeRow], bool]:
        """The filter as a function.

        Raises:
            UserError: a value is not of its form.
        """
        tests: list[Callable[[EpisodeRow], bool]] = []
        if self.reward is not None:
            compare, bound = _comparison(self.reward)
            tests.append(lambda row: row.reward is not None and compare(row.reward, bound))
        if self.step is not None:
            first, last = _steps(self.step)
            tests.append(lambda row: first <= row.step <= last)
        if (least := self.min_tokens) is not None:
            tests.append(lambda row: row.tokens >= least)
        if (most := self.max_tokens) is not None:
            tests.append(lambda row: row.tokens <= most)
        if (prompt := self.prompt) is not None:
            tests.append(lambda row: row.prompt_id == prompt or prompt.lower() in row.prompt.lower())
        if (reason := self.reason) is not None:
            tests.append(lambda row: reason.lower() in row.reason.lower())
        if self.error:
            tests.append(lambda row: row.failed)
        return lambda row: all(test(row) for test in tests)


def sorted_rows(rows: list[EpisodeRow], by: str) -> list[EpisodeRow]:
    """Rows in order; a name with a minus before it turns the order round. Raises `UserError` for an unknown name."""
    name, downwards = by.removeprefix("-"), by.startswith("-")
    if name not in SORTS:
        raise UserError(f"--sort {by!r} is unknown; allowed: {', '.join(SORTS)}, each also with - for the other way")
    key = SORTS[name]
    known = [row for row in rows if key(row) is not None]
    return sorted(known, key=key, reverse=downwards) + [row for row in rows if key(row) is None]


def _comparison(text: str) -> tuple[Callable[[float, float], bool], float]:
    found = _COMPARISON.fullmatch(text)
    if not found:
        raise UserError(f"--reward {text!r} is not a comparison; write for example '<0.5', '>=1' or 0 (in quotes)")
    return _COMPARE[found.group(1) or "="], float(found.group(2))


def _steps(text: str) -> tuple[int, int]:
    found = _STEPS.fullmatch(text)
    if not found:
        raise UserError(f"--step {text!r} is neither a version nor a range; write for example 20 or 10-30")
    first = int(found.group(1))
    return first, int(found.group(2) or first)
