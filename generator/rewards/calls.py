"""Calls a user's reward function by the names of its parameters, which are SPO's, verl's or TRL's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import BoundArguments, Parameter
from typing import Any

from common.errors import UserError
from common.plugins import check_options
from generator.rewards.outcome import Outcome

OURS = ("text", "answer", "row")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = ("prompts", "completions")
# Other fields of the outcome that a function may ask for. A parameter with a default is not filled from these: it is
# one of the user's own options, such as `limit`.
MORE = tuple(field.name for field in fields(Outcome) if field.name not in OURS)
FORMS = (
    f"({', '.join(OURS)}), or verl's ({', '.join(VERL)}), or TRL's ({', '.join(TRL)}, **columns): parameters are "
    "filled by name, some may be left out, and others are options"
)


class Function:
    """A user's function as a reward.

    Args:
        name: the reward's name in the configuration.

    Raises:
        UserError: a parameter's name is unknown, or the options do not fit.
    """

    def __init__(self, name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.function = function
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError):  # written in C
            raise UserError(f"{_refused(name)}: its parameters have no names") from None
        parameters = self._signature.parameters
        self.is_batch = "completions" in parameters
        self._rest = next((key for key, one in parameters.items() if one.kind is Parameter.VAR_KEYWORD), None)
        starred = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        named = {key: one for key, one in parameters.items() if one.kind not in starred}
        # Parameters that SPO fills, each with the name of its value; the underscore of `_row` says that it is not used.
        self._filled = {key: key.lstrip("_") for key, one in named.items() if self._fills(key, one, options)}
        required = [key for key, one in named.items() if one.default is Parameter.empty]
        unknown = [key for key in required if key not in self._filled and key not in options]
        if unknown or not self._filled:
            what = f"there is no value named {unknown[0]!r}" if unknown else "its parameters have none of these names"
            raise UserError(f"{_refused(name)}: {what}")
        self._forms = [form for form in (OURS, VERL) if not set(form).isdisjoint(self._filled.values())]
        field = f"episode.reward_options of {name!r}"
        places = [key for key, one in parameters.items() if one.kind is Parameter.POSITIONAL_ONLY]
        fixed = {key: None for key in self._filled if key not in places}
        self._options = check_options(function, options, field, places, fixed)

    def takes(self, field: str) -> bool:
        """Return whether a parameter is filled with this field of the outcome."""
        return not self.is_batch and field in self._filled.values()

    def score(self, outcome: Outcome) -> Any:
        """Call the function, with TRL's parameters for a batch of one, and return its result.

        Raises:
            ValueError: the row has no column that the function asks for.
        """
        values = _batch(outcome) if self.is_batch else _values(outcome)
        parameters = self._signature.parameters
        arguments: dict[str, Any] = {}
        for key in parameters:
            if key in self._options:
                arguments[key] = self._options[key]
            elif self._filled.get(key) in values:
                arguments[key] = values[self._filled[key]]
            elif key in self._filled and parameters[key].default is Parameter.empty:
                raise ValueError(f"the data row has no column {key!r}, which the function asks for")
        if self._rest is not None:
            names = values if self.is_batch else [name for form in self._forms for name in form]
            others = {name: values[name] for name in names if name not in self._filled.values()}
            arguments[self._rest] = others | {key: self._options[key] for key in self._options.keys() - parameters}
        bound = BoundArguments(self._signature, arguments)  # type: ignore[arg-type]
        return self.function(*bound.args, **bound.kwargs)

    def _fills(self, key: str, parameter: Parameter, options: Mapping[str, Any]) -> bool:
        name, is_required = key.lstrip("_"), parameter.default is Parameter.empty
        if self.is_batch:
            # A parameter keeps its default if a row lacks the column. `completion_ids` are not available here.
            return name in TRL or (key not in options and name != "completion_ids")
        return name in (*OURS, *VERL) or (name in MORE and is_required and key not in options)


def _refused(name: str) -> str:
    return f"episode.reward = {name!r} cannot be called with {FORMS}"


def _values(outcome: Outcome) -> dict[str, Any]:
    """The values of SPO's and verl's parameters, by name."""
    more = {name: getattr(outcome, name) for name in (*OURS, *MORE)}
    return more | {
        "data_source": outcome.row.get("data_source", ""),
        # Everything that the model wrote, even if a limit cut it off, as in verl.
        "solution_str": outcome.response or outcome.text,
        "ground_truth": outcome.answer,
        "extra_info": outcome.row.get("extra_info", outcome.row),
    }


def _batch(outcome: Outcome) -> dict[str, list[Any]]:
    """TRL's arguments for one episode: prompts, completions, and each column of the data."""
    text: Any = outcome.response or outcome.text
    if not isinstance(outcome.prompt, str):
        text = [{"role": "assistant", "content": text}]
    answers = {"answer": outcome.answer, outcome.answer_column or "answer": outcome.answer}
    columns = answers | outcome.row | {"prompts": outcome.prompt, "completions": text}
    return {name: [value] for name, value in columns.items()}
