"""Reference answers and rewards, made comparable."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from decimal import Decimal
from typing import Any

import numpy as np

TOLERANCE = 1e-9  # relative to the end of the range, and absolute near 0


def normal_answer(answer: Any) -> Any:
    """A number or a boolean as text; text, lists and mappings unchanged.

    The number 79 of any type (int, float, numpy's) and the text "79" are all "79". Floats are written out in full
    (1e-05 is "0.00001"), booleans as Python writes them ("True", "False").
    """
    if isinstance(answer, np.generic):
        answer = answer.item()
    if isinstance(answer, float):
        return _decimal(answer)
    return str(answer) if isinstance(answer, int) else answer


def answer_text(answer: Any) -> str:
    """The text that a response is compared with: the normal answer; lists and mappings as JSON."""
    answer = normal_answer(answer)
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)


def is_missing(answer: Any) -> bool:
    """True if there is nothing to compare with: null, NaN, blank text, an empty list or mapping."""
    if isinstance(answer, str):
        return not answer.strip()
    if isinstance(answer, float | np.floating):
        return math.isnan(answer)
    return answer is None or (isinstance(answer, list | dict) and not answer)


def answer_kind(answer: Any) -> str:
    """`text`, `number`, `boolean`, `list` or `mapping`."""
    if isinstance(answer, bool | np.bool_):
        return "boolean"
    if isinstance(answer, int | float | np.number):
        return "number"
    for kind, name in ((str, "text"), (list, "list"), (dict, "mapping")):
        if isinstance(answer, kind):
            return name
    return type(answer).__name__


def are_mixed(kinds: Collection[str]) -> bool:
    """True if no reward can compare all of these kinds of answers; texts and numbers count as one kind."""
    return len({"text" if kind == "number" else kind for kind in kinds}) > 1


def _decimal(number: float) -> str:
    if not math.isfinite(number):
        return str(number)
    if number == 0:
        return "0"  # and not "-0"
    return format(Decimal(repr(number)), "f").removesuffix(".0")


def in_range(reward: float, low: float, high: float) -> float:
    """The reward, set to an end of the range if it differs from it only by rounding.

    Weights such as .05, .55, .3 and .1 are not exact in binary, so a perfect answer might get
    1.0000000000000002, which is outside the range, or 0.9999999999999999, which is not the full reward.

    Raises:
        ValueError: the reward is outside the range, or not a number.
    """
    for end in (low, high):
        if math.isclose(reward, end, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            return end
    if not low <= reward <= high:
        raise ValueError(f"reward {reward} is outside sampler.tracker.reward_range [{low}, {high}]")
    return reward
