"""Finds the rewards that a configuration names, and makes them with their options."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, Protocol

from common.errors import UserError
from common.plugins import check_options, load_object, make_object
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
}
OWN = "agent"  # the name of the reward that an agent gives itself

GROUP = "spo.rewards"  # entry points of installed packages

Where = Literal["inline", "pool", "loop"]


class Reward(Protocol):
    """Turns an episode into a number; `score` may be a coroutine function.

    A reward that compares a final answer may have a method `answer(outcome)` that returns its text, or None, for the
    majority votes of evaluations.
    """

    def score(self, outcome: Outcome) -> float | Awaitable[float]: ...


class Builtin(ABC):
    """A built-in reward.

    Attributes:
        where: `inline`, at once; `pool`, in another process; `loop`, a coroutine that waits for a server.
        bounds: least and greatest value; None where they are not known.
    """

    where: Where = "inline"
    bounds: tuple[float, float] | None = (0.0, 1.0)

    @abstractmethod
    def score(self, outcome: Outcome) -> float | Awaitable[float]: ...


class _Function:
    """A user's function of (text, answer, row)."""

    def __init__(self, function: Callable[..., float], options: Mapping[str, Any]) -> None:
        self._function, self._options = function, options

    def score(self, outcome: Outcome) -> float:
        return self._function(outcome.text, outcome.answer, outcome.row, **self._options)


def check_reward(name: str, options: Mapping[str, Any], fixed: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Check a reward's options without calling it, and return them; `fixed` are further arguments.

    Raises:
        UserError: the reward cannot be found, or does not take these options.
    """
    reward, field = _find(name), f"episode.reward_options of {name!r}"
    if isinstance(reward, type):
        if not callable(getattr(reward, "score", None)):
            raise UserError(f"episode.reward = {name!r}: the class has no method score(outcome)")
        return check_options(reward, options, field, fixed=fixed)
    if callable(reward):
        _check_call(name, reward)
        return check_options(reward, options, field, ("text", "answer", {}))
    raise UserError(f"episode.reward = {name!r} is neither a function of (text, answer, row) nor a class")


def _check_call(name: str, reward: Callable[..., Any]) -> None:
    try:
        inspect.signature(reward).bind_partial("text", "answer", {})
    except TypeError as error:
        raise UserError(
            f"episode.reward = {name!r} cannot be called with (text, answer, row): {error}; these three come first"
        ) from None
    except ValueError:
        return  # written in C, without a signature


def make_reward(name: str, options: Mapping[str, Any], fixed: Mapping[str, Any] = {}) -> Any:
    """Make a reward, ready to score; raises `UserError` like `check_reward`, or if a class refuses a value."""
    checked = check_reward(name, options, fixed)
    reward = _find(name)
    if not isinstance(reward, type):
        return _Function(reward, checked)
    return make_object(reward, options, f"episode.reward_options of {name!r}", fixed)


def has_answer(name: str) -> bool:
    return callable(getattr(_find(name), "answer", None))


def sees_folder(name: str) -> bool:
    """Whether a reward is a class of the user's own, which may read the files that an agent has left."""
    return name not in BUILTIN and isinstance(_find(name), type)


def _find(name: str) -> Any:
    reward = load_object(name, BUILTIN, "episode.reward", GROUP)
    return load_object(reward, {}, "episode.reward") if name in BUILTIN else reward
