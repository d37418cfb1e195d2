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

BUILTIN: dict[str, Any] = {"corrector": Corrector, "scripted": Scripted, "llm": LlmUser}
ENTRY_POINTS = "spo.users"  # group of entry points for users of installed packages
METHODS = ("start", "respond", "finish")


def load_user(config: Config, make_scorer: Callable[[Config], Scorer]) -> UserSimulator | None:
    """Make `episode.user` with its `user_options`; None if it is not set.

    A class whose constructor has a parameter `checker` gets a `Checker`: the reward that the option `checker` names,
    made with `checker_options`; by default the run's own if that is a single one.

    Args:
        make_scorer: returns a scorer for a configuration; its owner closes it.

    Raises:
        UserError: there is no such class, or it does not take the options.
    """
    name, options = config.episode.user, dict(config.episode.user_options)
    if name is None:
        return None
    kind = load_object(name, BUILTIN, "episode.user", ENTRY_POINTS)
    if not isinstance(kind, type) or any(not callable(getattr(kind, method, None)) for method in METHODS):
        raise UserError(f"episode.user = {name!r} is not a class with {', '.join(METHODS)}")
    fixed: dict[str, Any] = {}
    if "checker" in inspect.signature(kind).parameters:
        checker, checker_options = options.pop("checker", None), options.pop("checker_options", {})
        checking = _checking(config, checker, checker_options)
        fixed["checker"] = _checker(make_scorer(checking), checking.data.answer_column)
    also = ("checker", "checker_options") if fixed else ()
    user: UserSimulator = make_object(kind, options, f"episode.user_options of {name!r}", fixed, also)
    return user


def _checking(config: Config, name: Any, options: Any) -> Config:
    """The configuration whose reward is the checker: the run's own, unless a name or options say otherwise."""
    reward = config.episode.reward
    if name is None:
        if not isinstance(reward, str):
            raise UserError(
                f"episode.user_options.checker must name one reward, because episode.reward = {reward!r} is a sum"
            )
        if not options:
            return config
        name = reward
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise UserError(
            f"episode.user_options: checker = {name!r} must be the name of a reward, checker_options = {options!r} "
            "its arguments"
        )
    # A checker's score is compared, never trained on, so it may be any number.
    tracker = config.sampler.tracker.model_copy(update={"reward_range": (float("-inf"), float("inf"))})
    episode = config.episode.model_copy(update={"reward": name, "reward_options": {name: dict(options)}})
    sampler = config.sampler.model_copy(update={"tracker": tracker})
    return config.model_copy(update={"episode": episode, "sampler": sampler})


def _checker(scorer: Scorer, answer_column: str | None) -> Checker:
    async def check(text: str, answer: Any, row: dict[str, Any]) -> Verdict:
        outcome = Outcome(text=text, response=text, answer=answer, row=row, answer_column=answer_column)
        score = (await scorer.score(outcome)).value
        return Verdict(score, _finding(text, score))

    return check


def _finding(text: str, score: float) -> str:
    """Describe a score to the model without revealing the answer."""
    if not text.strip():
        return "There was no answer."
    return f"It is {score:.0%} right." if 0 < score < 1 else ""
