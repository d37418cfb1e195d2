"""The run's simulated user, as the configuration names it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from common.config import Config
from common.errors import UserError
from common.plugins import load_object, make_object
from generator.rewards import Outcome, Scorer
from generator.users.base import Checker, UserSimulator, Verdict
from generator.users.corrector import Corrector
from generator.users.llm import LlmUser
from generator.users.scripted import Scripted
from sandbox_client import Sandbox

BUILTIN: dict[str, Any] = {"corrector": Corrector, "scripted": Scripted, "llm": LlmUser}
GROUP = "spo.users"  # entry points of installed packages
METHODS = ("start", "respond", "finish")


class Users:
    """A run's simulated user, and the scorer that was made only for it, if there is one."""

    def __init__(self, user: UserSimulator, own_scorer: Scorer | None) -> None:
        self.user = user
        self._own_scorer = own_scorer

    async def close(self) -> None:
        """To be called at the end of the process."""
        if close := getattr(self.user, "close", None):
            await close()
        if self._own_scorer is not None:
            await self._own_scorer.close()


def load_user(
    config: Config, scorer: Scorer | None = None, sandbox: Callable[[], Sandbox] | None = None
) -> Users | None:
    """Make `episode.user` with its `user_options`; None where there is none.

    A class whose constructor has a parameter `checker` gets a `Checker`: the reward that the option `checker` names,
    made with `checker_options`; by default the run's own if that is a single one, scored by `scorer` where it is given.
    `sandbox` is as a `Scorer` gets it.

    Raises:
        UserError: no such class, or options it does not take.
    """
    name, options = config.episode.user, dict(config.episode.user_options)
    if name is None:
        return None
    kind = load_object(name, BUILTIN, "episode.user", GROUP)
    if not isinstance(kind, type) or any(not callable(getattr(kind, method, None)) for method in METHODS):
        raise UserError(f"episode.user = {name!r} is not a class with {', '.join(METHODS)}")
    own: Scorer | None = None
    fixed: dict[str, Any] = {}
    if "checker" in inspect.signature(kind).parameters:
        checker, checker_options = options.pop("checker", None), options.pop("checker_options", {})
        if scorer is None or checker is not None or checker_options or not isinstance(config.episode.reward, str):
            scorer = own = _scorer(config, checker, checker_options, sandbox)
        fixed["checker"] = _checker(scorer)
    also = ("checker", "checker_options") if fixed else ()
    return Users(make_object(kind, options, f"episode.user_options of {name!r}", fixed, also), own)


def _scorer(config: Config, name: Any, options: Any, sandbox: Callable[[], Sandbox] | None) -> Scorer:
    if name is None:
        if not isinstance(config.episode.reward, str):
            raise UserError(
                f"episode.user_options.checker must name one reward, where episode.reward = {config.episode.reward!r} "
                "is a sum"
            )
        name, options = config.episode.reward, options or config.episode.reward_options.get(config.episode.reward, {})
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise UserError(
            f"episode.user_options: checker = {name!r} must be the name of a reward, checker_options = {options!r} "
            "its arguments"
        )
    # What a checker says is compared, never trained on: any number will do.
    tracker = config.sampler.tracker.model_copy(update={"reward_range": (float("-inf"), float("inf"))})
    return Scorer(
        config.model_copy(
            update={
                "episode": config.episode.model_copy(update={"reward": name, "reward_options": {name: dict(options)}}),
                "sampler": config.sampler.model_copy(update={"tracker": tracker}),
            }
        ),
        sandbox,
    )


def _checker(scorer: Scorer) -> Checker:
    async def check(text: str, answer: Any, row: dict[str, Any]) -> Verdict:
        score = (await scorer.score(Outcome(text=text, response=text, answer=answer, row=row))).value
        return Verdict(score, _finding(text, score))

    return check


def _finding(text: str, score: float) -> str:
    """What may be shown to the model without revealing the answer."""
    if not text.strip():
        return "There was no answer."
    return f"It is {score:.0%} right." if 0 < score < 1 else ""
