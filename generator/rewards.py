"""Rewards: functions from what the model answered and what is right to a number."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from common.errors import UserError
from common.plugins import load_object

# answer text of the last turn, reference answer, the data row's other columns -> reward
Reward = Callable[[str, Any, dict[str, Any]], float]

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def exact(text: str, answer: Any, row: dict[str, Any]) -> float:
    """1 if the last turn is the reference answer, white space aside."""
    return float(text.strip() == str(answer).strip())


def boxed(text: str, answer: Any, row: dict[str, Any]) -> float:
    """1 if the last \\boxed{} within the final 100 characters holds the reference answer."""
    found = _BOXED.findall(text[-100:])
    return float(bool(found) and found[-1].strip() == str(answer).strip())


BUILTIN: dict[str, Reward] = {"exact": exact, "boxed": boxed}


class Scorer:
    """The run's reward, with its limits."""

    def __init__(self, name: str, timeout: float, allowed: tuple[float, float]) -> None:
        self._reward: Reward = load_object(name, BUILTIN, "episode.reward")
        if not callable(self._reward):
            raise UserError(f"episode.reward = {name!r} is not a function of (text, answer, row)")
        self._inline = name in BUILTIN
        self._timeout = timeout
        self._allowed = allowed

    async def score(self, text: str, answer: Any, row: dict[str, Any]) -> float:
        """Reward of one answer.

        Raises:
            TimeoutError: the user's function took too long.
            ValueError: the reward leaves the declared range.
        """
        if self._inline:
            reward = self._reward(text, answer, row)
        else:
            reward = await asyncio.wait_for(asyncio.to_thread(self._reward, text, answer, row), self._timeout)
        low, high = self._allowed
        if not low <= reward <= high:
            raise ValueError(f"reward {reward} is outside sampler.tracker.reward_range [{low}, {high}]")
        return float(reward)
