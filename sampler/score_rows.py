"""Scored responses as JSON lines, one a response: `{"input": prompt, "score": number}`; other keys are ignored.

Rows of the SPO recipe are read too. Their `input` is a conversation as text, `user\\nPROMPT\\nassistant\\n`, which may
follow a system turn; `scores` may hold the scores of several responses.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

# The recipe itself looks for the last "user" instead, and so cuts prompts that hold such a line.
_CONVERSATION = re.compile(r"(?:\A|\n)user\n(.*)\nassistant\s*\Z", re.DOTALL)


def prompt_of(text: str) -> str:
    """The prompt of a row: the text between the first line `user` and the last line `assistant`, else all of it."""
    conversation = _CONVERSATION.search(text)
    return conversation[1].strip() if conversation else text


def read_score_rows(lines: Iterable[str]) -> tuple[dict[str, list[float]], list[str]]:
    """Scores by prompt, in the order of the lines, and for each bad line its number and what is wrong with it."""
    scores_by_prompt: dict[str, list[float]] = defaultdict(list)
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt, scores = _row(json.loads(line))
        except (ValueError, OverflowError, RecursionError) as error:
            problems.append(f"line {number}: {error}")
            continue
        scores_by_prompt[prompt] += scores
    return dict(scores_by_prompt), problems


def _row(row: Any) -> tuple[str, list[float]]:
    if not isinstance(row, dict) or not isinstance(row.get("input"), str):
        raise ValueError("no `input` with a prompt")
    scores: list[Any] = row["scores"] if isinstance(row.get("scores"), list) else [row.get("score")]
    for score in scores:
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise ValueError(f"the score {str(score)[:40]} is not a finite number")
    return prompt_of(row["input"]), scores
