"""Rewards for how long a response is, in tokens the model sampled."""

from __future__ import annotations

from typing import ClassVar

from common.errors import UserError
from generator.rewards.outcome import Outcome


class Length:
    """1 up to `free` tokens, then falling in a straight line to 0 at the limit.

        r = clip((limit - tokens) / (limit - free), 0, 1)

    Args:
        free: tokens that cost nothing.
        limit: where nothing is left; by default `episode.max_response_tokens`.
    """

    where: ClassVar = "inline"
    bounds: ClassVar = (0.0, 1.0)

    def __init__(self, free: int = 0, limit: int | None = None) -> None:
        if free < 0 or (limit is not None and limit <= free):
            raise UserError(f"free = {free} and limit = {limit}: 0 <= free < limit is needed")
        self._free, self._limit = free, limit

    def score(self, outcome: Outcome) -> float:
        limit = self._limit or outcome.limit
        # Where the episode's own limit is not above `free`, every token is free.
        span = limit - self._free
        return min(max((limit - outcome.tokens) / span, 0.0), 1.0) if span > 0 else 1.0


class Overlong:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), at most 0 and at least -1.

        r = 0                                   tokens <= limit - buffer
        r = (limit - buffer - tokens) / buffer  limit - buffer < tokens <= limit
        r = -1                                  limit < tokens

    Args:
        buffer: length of the slope; by default a fifth of the limit, as in the paper (4,096 of 20,480).
        limit: by default `episode.max_response_tokens`.
    """

    where: ClassVar = "inline"
    bounds: ClassVar = (-1.0, 0.0)

    def __init__(self, buffer: int | None = None, limit: int | None = None) -> None:
        if (buffer is not None and buffer < 1) or (limit is not None and limit < (buffer or 1)):
            raise UserError(f"buffer = {buffer} and limit = {limit}: 1 <= buffer <= limit is needed")
        self._buffer, self._limit = buffer, limit

    def score(self, outcome: Outcome) -> float:
        limit = self._limit or outcome.limit
        buffer = self._buffer or max(limit // 5, 1)
        return min(max((limit - buffer - outcome.tokens) / buffer, -1.0), 0.0)
