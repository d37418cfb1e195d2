"""Finds the rewards that a configuration names, and makes them with their options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from typing import Any

from common.errors import UserError
from common.plugins import check_options, load_object, make_object
from generator.rewards.calls import FORMS, Function
from generator.rewards.outcome import Outcome

BUILTIN: dict[str, str] = {
    "exact": "generator.rewards.rules:Exact",
    "boxed": "generator.rewards.rules:Boxed",
    "boxed_think": "generator.rewards.rules:BoxedThink",
    "math": "generator.rewards.verifiers:Maths",
    "reasoning_gym": "generator.rewards.verifiers:ReasoningGym",
    "code": "generator.rewards.code.reward:Code",
    "format": "generator.rewards.rules:Format",
    "length": "generator.rewards.rules:Length",
    "overlong": "generator.rewards.rules:Overlong",
    "judge": "generator.rewards.judge:Judge",
    "agent": "generator.rewards.rules:OwnReward",
    "container": "generator.rewards.rules:OwnReward",
}
OWN = "agent"  # the reward that an agent gives itself
IN_CONTAINER = "container"  # the reward that the task's own tests give, in the agent's container after the agent

ENTRY_POINTS = "spo.rewards"  # group of entry points for rewards of installed packages


class Builtin(ABC):
    """A built-in reward.

    One that compares a final answer has a method `answer(outcome)`, which returns its text, or None, for the majority
    votes of evaluations.

    Attributes:
        in_pool: whether it runs in another process.
        bounds: least and greatest value; None if they are not known.
    """

    in_pool = False
    bounds: tuple[float, float] | None = (0.0, 1.0)

    @abstractmethod
    def score(self, outcome: Outcome) -> float | Awaitable[float]:
        """Return the reward, or a coroutine if it waits for a server."""


def check_reward(name: str, options: Mapping[str, Any], fixed: Mapping[str, Any] = {}) -> Any:
    """Check a reward and its options; `fixed` are further arguments. Returns its class, or a function ready to score.

    Raises:
        UserError: the reward cannot be found, or does not take these options.
    """
    reward, field = _find(name), f"episode.reward_options of {name!r}"
    if isinstance(reward, type):
        if not callable(getattr(reward, "score", None)):
            raise UserError(f"episode.reward = {name!r}: the class has no method score(outcome)")
        check_options(reward, options, field, fixed=fixed)
        return reward
    if not callable(reward):
        raise UserError(f"episode.reward = {name!r} is neither a function of {FORMS} nor a class")
    return Function(name, reward, options)


def make_reward(name: str, options: Mapping[str, Any], fixed: Mapping[str, Any] = {}) -> Any:
    """Make a reward, ready to score; raises `UserError` like `check_reward`, or if a class refuses a value."""
    reward = check_reward(name, options, fixed)
    if isinstance(reward, Function):
        return reward
    return make_object(reward, options, f"episode.reward_options of {name!r}", fixed)


def has_answer(name: str) -> bool:
    return callable(getattr(_find(name), "answer", None))


def sees_folder(name: str, options: Mapping[str, Any]) -> bool:
    """Whether a reward may read the files that an agent has left: a user's class, or a function with `folder`."""
    if name in BUILTIN:
        return False
    reward = _find(name)
    return isinstance(reward, type) or Function(name, reward, options).takes("folder")


def _find(name: str) -> Any:
    reward = load_object(name, BUILTIN, "episode.reward", ENTRY_POINTS)
    return load_object(reward, {}, "episode.reward") if name in BUILTIN else reward
