"""Finds the rewards that a configuration names, and makes them with their options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from typing import Any, Literal

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
    "container": "generator.rewards.rules:ContainerReward",
}
OWN = "agent"  # the name of the reward that an agent gives itself
IN_CONTAINER = "container"  # and of the one that the task's tests give, in the agent's container

ENTRY_POINTS = "spo.rewards"  # group of entry points for rewards of installed packages

Where = Literal["inline", "pool", "loop"]


class Builtin(ABC):
    """A built-in reward.

    One that compares a final answer has a method `answer(outcome)`, which returns its text, or None, for the majority
    votes of evaluations.

    Attributes:
        where: where it runs: `inline`, at once; `pool`, in another process; `loop`, a coroutine that waits for a
            server.
        bounds: least and greatest value; None if they are not known.
    """

    where: Where = "inline"
    bounds: tuple[float, float] | None = (0.0, 1.0)

    @abstractmethod
    def score(self, outcome: Outcome) -> float | Awaitable[float]: ...


def check_reward(name: str, options: Mapping[str, Any], fixed: Mapping[str, Any] = {}) -> None:
    """Check a reward and its options without calling it; `fixed` are further arguments.

    Raises:
        UserError: the reward cannot be found, or does not take these options.
    """
    reward, field = _find(name), f"episode.reward_options of {name!r}"
    if isinstance(reward, type):
        if not callable(getattr(reward, "score", None)):
            raise UserError(f"episode.reward = {name!r}: the class has no method score(outcome)")
        check_options(reward, options, field, fixed=fixed)
    elif callable(reward):
        Function(name, reward, options)
    else:
        raise UserError(f"episode.reward = {name!r} is neither a function of {FORMS} nor a class")


def make_reward(name: str, options: Mapping[str, Any], fixed: Mapping[str, Any] = {}) -> Any:
    """Make a reward, ready to score; raises `UserError` like `check_reward`, or if a class refuses a value."""
    check_reward(name, options, fixed)
    reward = _find(name)
    if not isinstance(reward, type):
        return Function(name, reward, options)
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
