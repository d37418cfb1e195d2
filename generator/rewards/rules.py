"""Rewards by rule, computed at once: exact match, boxed answers, format, and length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from common.errors import UserError
from generator.rewards.outcome import Outcome
from generator.rewards.registry import Builtin

TAIL = 100  # characters at the end of a text that the recipe searches for a boxed answer


class Exact(Builtin):
    """1 if the last turn is the reference answer, ignoring white space around both; else 0."""

    def score(self, outcome: Outcome) -> float:
        return float(outcome.text.strip() == outcome.answer_text.strip())

    def answer(self, outcome: Outcome) -> str:
        return outcome.text


class Boxed(Builtin):
    r"""1 if the last turn's last \boxed{} within its final 100 characters holds the reference answer; else 0.

    White space around either is ignored.
    """

    def score(self, outcome: Outcome) -> float:
        answer = self.answer(outcome)
        return float(answer is not None and answer.strip() == outcome.answer_text.strip())

    def answer(self, outcome: Outcome) -> str | None:
        return last_boxed(outcome.text[-TAIL:])


class BoxedThink(Builtin):
    r"""The recipe's maths reward, over the whole response: 1 if all of these hold, else 0.

    - `</think>` occurs exactly once;
    - neither `<code>` nor `<interpreter>` occurs after it;
    - the last \boxed{} within the final 100 characters is exactly the reference answer.
    """

    def score(self, outcome: Outcome) -> float:
        parts = outcome.response.split("</think>", 2)
        if len(parts) != 2 or "<code>" in parts[1] or "<interpreter>" in parts[1]:
            return 0.0
        return float(self.answer(outcome) == outcome.answer_text)

    def answer(self, outcome: Outcome) -> str | None:
        return last_boxed(outcome.response[-TAIL:])


class OwnReward(Builtin):
    """The reward that an agent gave itself, or that the task's tests gave in the agent's container after it."""

    bounds = None

    def score(self, outcome: Outcome) -> float:
        if outcome.reward is None:
            raise ValueError("the agent gave no reward; episode.reward = 'agent' needs one, returned or sent")
        return outcome.reward


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{} in a text, braces within it balanced; None if there is none, or it never closes."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for i, character in enumerate(text[start:], start):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:i]
    return None


def compiled(pattern: str, flags: re.RegexFlag = re.NOFLAG, group: str = "") -> re.Pattern[str]:
    """Compile a user's pattern; raises `UserError` if it is invalid, or lacks the group that is to match `group`."""
    try:
        made = re.compile(pattern, flags)
    except re.error as error:
        raise UserError(f"pattern = {pattern!r} is not a regular expression: {error}") from None
    if group and not made.groups:
        raise UserError(f"pattern = {pattern!r} has no group (...) around {group}")
    return made


class Format(Builtin):
    """1 if the episode has the wanted form, else 0: a pattern that it matches, or tags that it contains in order.

    Tags with which the chat template begins the assistant's turns count as written by the model; with a pattern, the
    text may match with or without them.

    Args:
        pattern: regular expression for the whole text; `.` matches line ends too.
        tags: strings that each occur exactly once, one after the other: ["<think>", "</think>"].
        of: `response`, everything after the prompt, or `text`, the last turn alone.

    Raises:
        UserError: neither or both are given, or the pattern is not a regular expression.
    """

    def __init__(
        self,
        pattern: str | None = None,
        tags: Sequence[str] | None = None,
        of: Literal["response", "text"] = "response",
    ) -> None:
        if (pattern is None) == (not tags):
            raise UserError("give either `pattern` (a regular expression) or `tags` (a list of strings)")
        if of not in ("response", "text"):
            raise UserError(f"of = {of!r} is neither `response` nor `text`")
        if isinstance(tags, str) or not all(isinstance(tag, str) and tag for tag in tags or ()):
            raise UserError(f"tags = {tags!r} is not a list of strings")
        if len(set(tags or ())) < len(tags or ()):
            raise UserError(f"tags = {tags!r} has one of them twice, and each must occur exactly once")
        self._pattern = compiled(pattern, re.DOTALL) if pattern is not None else None
        self._tags, self._of = tags or (), of
        # A text of the model can make a pattern backtrack for hours, and the event loop must not wait for that.
        self.in_pool = pattern is not None

    def score(self, outcome: Outcome) -> float:
        text = outcome.response if self._of == "response" else outcome.text
        whole = outcome.opened + text
        if self._pattern is not None:
            return float(any(map(self._pattern.fullmatch, {text, whole})))
        at = 0
        for tag in self._tags:
            start = whole.find(tag, at)
            if start < 0 or whole.count(tag) != 1:
                return 0.0
            at = start + len(tag)
        return 1.0


class Length(Builtin):
    """1 up to `free` tokens, then falling in a straight line to 0 at the limit.

        r = clip((limit - tokens) / (limit - free), 0, 1)

    Args:
        free: tokens that cost nothing.
        limit: tokens at which the reward is 0; by default `episode.max_response_tokens`.
    """

    def __init__(self, free: int = 0, limit: int | None = None) -> None:
        if free < 0 or (limit is not None and limit <= free):
            raise UserError(f"free = {free} and limit = {limit}: 0 <= free < limit is needed")
        self._free, self._limit = free, limit

    def score(self, outcome: Outcome) -> float:
        limit = self._limit or outcome.limit
        # If the episode's own limit is not above `free`, every token is free.
        span = limit - self._free
        return min(max((limit - outcome.tokens) / span, 0.0), 1.0) if span > 0 else 1.0


class Overlong(Builtin):
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), at most 0 and at least -1.

        r = 0                                   tokens <= limit - buffer
        r = (limit - buffer - tokens) / buffer  limit - buffer < tokens <= limit
        r = -1                                  limit < tokens

    Args:
        buffer: length of the slope; by default a fifth of the limit, as in the paper (4,096 of 20,480).
        limit: by default `episode.max_response_tokens`.
    """

    bounds = (-1.0, 0.0)

    def __init__(self, buffer: int | None = None, limit: int | None = None) -> None:
        if (buffer is not None and buffer < 1) or (limit is not None and limit < (buffer or 1)):
            raise UserError(f"buffer = {buffer} and limit = {limit}: 1 <= buffer <= limit is needed")
        self._buffer, self._limit = buffer, limit

    def score(self, outcome: Outcome) -> float:
        limit = self._limit or outcome.limit
        buffer = self._buffer or max(limit // 5, 1)
        return min(max((limit - buffer - outcome.tokens) / buffer, -1.0), 0.0)
