"""A user that checks the answer and, if it is wrong, says so and asks again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from generator.chat.template import Message
from generator.users.base import Checker, UserTurn, last_answer


@dataclass(slots=True)
class _Pupil:
    answer: Any
    row: dict[str, Any]
    corrections: int = 0


class Corrector:
    """Ends the conversation at a right answer; corrects a wrong one at most `turns` times.

    Args:
        checker: scores the answers.
        turns: maximum number of corrections in an episode.
        right_from: score from which an answer is right.
        message: reply to a wrong answer; {finding} is the checker's, with a space before it if there is one.
        discount: what a right answer is worth after each correction, as a factor: after n corrections the turn's
            reward is score * (discount^n - 1), which lowers the final score for lateness.
        penalty: what each wrong answer costs: the turn's reward is -penalty.
    """

    def __init__(
        self,
        checker: Checker,
        *,
        turns: int = 3,
        right_from: float = 1.0,
        message: str = "That is not right.{finding} Please try again.",
        discount: float = 1.0,
        penalty: float = 0.0,
    ) -> None:
        if turns < 1 or not 0 <= discount <= 1:
            raise UserError(f"turns = {turns} must be at least 1 and discount = {discount} between 0 and 1")
        if not 0 <= penalty < math.inf:
            raise UserError(f"penalty = {penalty} must be 0 or more")
        try:
            message.format(finding="")
        except (LookupError, TypeError, ValueError, AttributeError):
            raise UserError(f"message = {message!r}: the only name allowed in braces is {{finding}}") from None
        self._check = checker
        self._turns, self._right_from, self._message, self._discount = turns, right_from, message, discount
        self._penalty = penalty
        self._pupils: dict[str, _Pupil] = {}

    async def start(self, episode_id: str, *, answer: Any = None, row: dict[str, Any] | None = None, **_: Any) -> None:
        self._pupils[episode_id] = _Pupil(answer, row or {})

    async def respond(self, episode_id: str, messages: list[Message]) -> UserTurn:
        """Stop at a right answer, or when corrected often enough; else correct."""
        pupil = self._pupils[episode_id]
        score, finding = await self._check(last_answer(messages), pupil.answer, pupil.row)
        metadata = {"score": score} | ({"finding": finding} if finding else {})
        if score >= self._right_from:
            return UserTurn(True, reward=score * (self._discount**pupil.corrections - 1), metadata=metadata)
        if pupil.corrections == self._turns:
            return UserTurn(True, reward=0.0 - self._penalty, metadata=metadata)  # never -0.0
        pupil.corrections += 1
        text = self._message.format(finding=finding and f" {finding}")
        return UserTurn(False, text, 0.0 - self._penalty, metadata)

    async def finish(self, episode_id: str) -> None:
        self._pupils.pop(episode_id, None)
