"""Functions that a configuration names: the loss, the advantage, the tracker's kind, and the selection's criterion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any

import numpy as np

from common.config import Config
from common.config.algorithm import METHODS
from common.config.losses import LOSS_NAMES
from common.config.sampler import CRITERIA, KINDS
from common.errors import UserError
from common.plugins import check_options, find_object, load_object

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of training that is one of SPO's functions, or one of the user's own."""

    key: str  # names the function; its options are under `{key}_options`
    builtin: Collection[str]  # the names of SPO's own
    group: str  # of entry points, for functions of installed packages
    arguments: tuple[str, ...]  # what the function is called with, before its options

    def find(self, name: str) -> None:
        """Raise `UserError` if nothing has this name; imports nothing."""
        if name not in self.builtin:
            find_object(name, self.builtin, self.key, self.group)

    def load(self, name: str, table: Mapping[str, Callable[..., Any]], options: Mapping[str, Any]) -> Any:
        """The function of this name, its options bound; the user's own raises nothing but `UserError`.

        Args:
            table: SPO's own functions by name; they take no options.

        Raises:
            UserError: there is none, it takes other arguments, or not these options.
        """
        if name in table:
            if options:
                raise UserError(f"{self.key}_options: {name!r} takes none; remove {', '.join(options)}")
            return table[name]
        function = load_object(name, dict.fromkeys(self.builtin), self.key, self.group)
        wanted = f"a function of ({', '.join(self.arguments)})"
        if not callable(function):
            raise UserError(f"{self.key} = {name!r} is not {wanted}")
        if not _takes(function, len(self.arguments)):
            raise UserError(f"{self.key} = {name!r} must be {wanted}, followed by its options")
        field = f"{self.key}_options of {name!r}"
        return partial(self._call, name, function, check_options(function, options, field, self.arguments))

    def array(self, name: str, result: Any, shape: tuple[int, ...]) -> np.ndarray:
        """What a user's function returned, float64; raises `UserError` unless it is finite numbers of this shape."""
        try:
            values = np.asarray(result, np.float64)
        except (TypeError, ValueError):
            raise UserError(f"{self._must(name, shape)}; it returned {type(result).__name__}") from None
        if values.shape != shape:
            raise UserError(f"{self._must(name, shape)}; it returned the shape {list(values.shape)}")
        if not np.isfinite(values).all():
            raise UserError(f"{self._must(name, shape)}; it returned {values[~np.isfinite(values)][0]}")
        return values

    def _must(self, name: str, shape: tuple[int, ...]) -> str:
        return f"{self.key} = {name!r} must return finite numbers of the shape {list(shape)}"

    def _call(self, name: str, function: Callable[..., Any], options: Mapping[str, Any], *arguments: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as error:  # a user's function may raise anything
            raise UserError(f"{self.key} = {name!r} failed: {type(error).__name__}: {error}") from error


def _takes(function: Callable[..., Any], number: int) -> bool:
    """Whether a function may be called with this many positional arguments."""
    try:
        parameters = signature(function).parameters.values()
    except ValueError:
        return True  # written in C
    positional = sum(one.kind in POSITIONAL for one in parameters)
    return positional >= number or any(one.kind is Parameter.VAR_POSITIONAL for one in parameters)


LOSS = Part("algorithm.loss", LOSS_NAMES, "spo.losses", ("tokens", "config"))
ADVANTAGE = Part("algorithm.advantage", METHODS, "spo.advantages", ("rewards", "baselines", "groups", "tokens"))
KIND = Part("sampler.tracker.kind", KINDS, "spo.trackers", ("alpha", "beta", "reward", "rho"))
CRITERION = Part("sampler.selection.criterion", CRITERIA, "spo.criteria", ("values", "counts", "visits", "rng"))


def find_parts(config: Config) -> None:
    """Raise `UserError` for a part whose name is unknown; imports none of them."""
    algorithm, sampler = config.algorithm, config.sampler
    LOSS.find(algorithm.loss)
    ADVANTAGE.find(algorithm.advantage or algorithm.method)
    KIND.find(sampler.tracker.kind)
    CRITERION.find(sampler.selection.criterion)
