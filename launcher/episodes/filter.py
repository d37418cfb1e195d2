"""Filters and orders of `spo episodes`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

from common.errors import UserError
from launcher.episodes.rows import EpisodeRow

Test = Callable[[EpisodeRow], bool]

_COMPARISON = re.compile(r"\s*(<=|>=|==|=|!=|<|>)?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*", re.IGNORECASE)
_STEPS = re.compile(r"(\d+)(?:-(\d+))?")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
# Sort keys by name. Episodes without a value come last in either order.
SORTS: dict[str, Callable[[EpisodeRow], Any]] = {
    "step": lambda row: row.step,
    "reward": lambda row: row.reward,
    "turns": lambda row: row.turns,
    "tokens": lambda row: row.tokens,
    "seconds": lambda row: row.seconds,
    "prompt": lambda row: row.prompt_id,
}


def reward_test(text: str) -> Test:
    """A test such as '<0.5', '>=1' or 0; raises `UserError` if it is not one."""
    match = _COMPARISON.fullmatch(text)
    if not match:
        raise UserError(f"--reward {text!r} is not a comparison; write for example '<0.5', '>=1' or 0 (in quotes)")
    compare, bound = _OPERATORS[match.group(1) or "="], float(match.group(2))
    return lambda row: row.reward is not None and compare(row.reward, bound)


def step_test(text: str) -> Test:
    """A version such as 20, or a range such as 10-30; raises `UserError` if it is neither."""
    match = _STEPS.fullmatch(text)
    if not match:
        raise UserError(f"--step {text!r} is neither a version nor a range; write for example 20 or 10-30")
    first, last = int(match.group(1)), int(match.group(2) or match.group(1))
    return lambda row: first <= row.step <= last


def sorted_rows(rows: list[EpisodeRow], by: str) -> list[EpisodeRow]:
    """Rows in order of a column; `-NAME` is the reverse order. Raises `UserError` for an unknown name."""
    name, reverse = by.removeprefix("-"), by.startswith("-")
    if name not in SORTS:
        raise UserError(f"--sort {by!r} is unknown; allowed: {', '.join(SORTS)}, each also with - for the other way")
    key = SORTS[name]
    known = [row for row in rows if key(row) is not None]
    return sorted(known, key=key, reverse=reverse) + [row for row in rows if key(row) is None]
