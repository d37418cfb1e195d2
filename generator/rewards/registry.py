"""Finds the rewards that a configuration names, and makes them with their options."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, Protocol

from common.errors import UserError
from common.plugins import load_object
from generator.rewards.outcome import Outcome

# Each with where it runs (`where`) and what it can return at the least and the most (`bounds`).
BUILTIN: dict[str, str] = {
    "exact": "generator.rewards.text:Exact",
    "boxed": "generator.rewards.text:Boxed",
    "boxed_think": "generator.rewards.text:BoxedThink",
    "math": "generator.rewards.maths:Maths",
    "code": "generator.rewards.code:Code",
    "format": "generator.rewards.text:Format",
    "length": "generator.rewards.shaping:Length",
    "overlong": "generator.rewards.shaping:Overlong",
    "judge": "generator.rewards.judge:Judge",
}

Where = Literal["inline", "pool", "loop"]


class Reward(Protocol):
    """From an episode to a number; `score` may be a coroutine function."""

    def score(self, outcome: Outcome) -> float | Awaitable[float]: ...


class Builtin(Reward, Protocol):
    """A reward of our own.

    Attributes:
        where: `inline`, at once; `pool`, in another process; `loop`, a coroutine that waits for a server.
        bounds: least and greatest value.
    """

    where: Where
    bounds: tuple[float, float]


class _Function:
    """A user's function of (text, answer, row)."""

    def __init__(self, function: Callable[..., float], options: Mapping[str, Any]) -> None:
        self._function, self._options = function, options

    def score(self, outcome: Outcome) -> float:
        return self._function(outcome.text, outcome.answer, outcome.row, **self._options)


def check_reward(name: str, options: Mapping[str, Any]) -> None:
    """Raise `UserError` where the reward cannot be found or does not take these options; nothing is called yet."""
    found = _find(name)
    if isinstance(found, type):
        if not callable(getattr(found, "score", None)):
            raise UserError(f"episode.reward = {name!r}: the class has no method score(outcome)")
        _fits(name, found, options)
    elif callable(found):
        _fits(name, found, options, "text", "answer", {})
    else:
        raise UserError(f"episode.reward = {name!r} is neither a function of (text, answer, row) nor a class")


def make_reward(name: str, options: Mapping[str, Any]) -> Any:
    """The reward, ready to score.

    Raises:
        UserError: as `check_reward`, or a built-in refuses a value.
    """
    check_reward(name, options)
    found = _find(name)
    if not isinstance(found, type):
        return _Function(found, options)
    try:
        return found(**options)
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"episode.reward_options of {name!r}: {error}") from None


def _find(name: str) -> Any:
    found = load_object(name, BUILTIN, "episode.reward")
    return load_object(found, {}, "episode.reward") if name in BUILTIN else found


def _fits(name: str, target: Callable[..., Any], options: Mapping[str, Any], *given: Any) -> None:
    try:
        inspect.signature(target).bind(*given, **options)
    except TypeError as error:
        raise UserError(f"episode.reward_options of {name!r}: {error}") from None
    except ValueError:
        pass  # written in C, and silent about its arguments
