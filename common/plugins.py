"""Finds and makes what a configuration names: tools, simulated users, rewards, call formats.

A name is built in, a `module:object` of the user, or an entry point of an installed package.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from common.errors import UserError, nearest

FOLDERS: list[Path] = []  # with modules of the user's own


def use_modules(folder: Path) -> None:
    """Add a folder to the module search path, after the installed packages."""
    if folder not in FOLDERS:
        FOLDERS.append(folder)
    # The finder of an editable installation is asked after all of `sys.path`. So our own path is added first, or a
    # `common.py` in the user's folder would hide our package.
    for place in (str(Path(__file__).parents[1]), str(folder)):
        if place not in sys.path:
            sys.path.append(place)


def load_object(name: str, builtin: Mapping[str, Any], field: str, group: str | None = None) -> Any:
    """The object behind `name`; a package cannot replace a built-in one.

    Args:
        field: configuration key to blame.
        group: of the entry points that packages announce such objects under, for example `spo.tools`.

    Raises:
        UserError: there is no such object, or it cannot be imported.
    """
    if name in builtin:
        return builtin[name]
    module_name, _, attribute = find_object(name, builtin, field, group).partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever a user's module raises; a script may end the process
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        hint = _hidden(module_name) or (_allowed(builtin, group) if missing else _where(error))
        raise UserError(f"{field} = {name!r}: cannot import {module_name} ({reason}); {hint}") from None
    if not attribute or not hasattr(module, attribute):
        near = _near(attribute, [name for name in vars(module) if not name.startswith("_")])
        hint = _hidden(module_name) or near + _allowed(builtin, group)
        raise UserError(f"{field} = {name!r}: module {module_name} has no {attribute}; {hint}")
    return getattr(module, attribute)


def find_object(name: str, builtin: Iterable[str], field: str, group: str | None = None) -> str:
    """The `module:object` behind a name that is not built in; imports nothing. Raises `UserError` if there is none."""
    module, _, attribute = name.partition(":")
    if attribute and module.endswith(".py"):
        dotted = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        shown = dotted if not dotted.startswith(".") else Path(module).stem
        raise UserError(f"{field} = {name!r}: this is a file; write the module, {shown}:{attribute}")
    values = {name} if ":" in name else {f"{one.module}:{one.attr}" for one in _announced(group) if one.name == name}
    if len(values) > 1:
        raise UserError(f"{field} = {name!r} is the name of several installed objects; give one of {sorted(values)}")
    if not values:
        raise UserError(f"{field} = {name!r} is unknown; {_near(name, builtin)}{_allowed(builtin, group)}")
    return values.pop()


def make_object(
    kind: type, options: Mapping[str, Any], field: str, fixed: Mapping[str, Any] = {}, also: Sequence[str] = ()
) -> Any:
    """`kind(**fixed, **options)`, the options checked; raises `UserError` if the class refuses one."""
    checked = check_options(kind, options, field, fixed=fixed, also=also)
    try:
        return kind(**fixed, **checked)
    except (Exception, SystemExit) as error:  # whatever a user's class raises
        is_plain = isinstance(error, UserError | TypeError | ValueError)
        raise UserError(f"{field}: {error if is_plain else f'{type(error).__name__}: {error}'}") from None


def check_options(
    target: Callable[..., Any],
    options: Mapping[str, Any],
    field: str,
    arguments: Sequence[Any] = (),
    fixed: Mapping[str, Any] = {},
    also: Sequence[str] = (),
) -> dict[str, Any]:
    """Options for a class or function, each converted to the type that the signature names, if it names one.

    Args:
        field: configuration key to blame.
        arguments, fixed: arguments that the caller passes itself; they are not options.
        also: options that the caller has handled itself, for the list of those that are allowed.

    Raises:
        UserError: one is missing, unknown or of another type.
    """
    try:
        signature = inspect.signature(target)
    except ValueError:
        return dict(options)  # the target is written in C and has no signature
    allowed = [
        name
        for name, parameter in list(signature.parameters.items())[len(arguments) :]
        if name not in fixed and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if taken := [name for name in options if name in fixed]:
        raise UserError(f"{field}: {taken[0]!r} is not an option; allowed: {', '.join([*also, *allowed]) or 'none'}")
    try:
        signature.bind(*arguments, **{**options, **fixed})
    except TypeError as error:
        raise UserError(f"{field}: {error}; allowed: {', '.join([*also, *allowed]) or 'none'}") from None
    return {
        name: _typed(value, signature.parameters[name], _hints(target).get(name, Any), f"{field}: {name}")
        if name in allowed
        else value
        for name, value in options.items()
    }


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(target.__init__ if isinstance(target, type) else target)  # type: ignore[misc]
    except (NameError, TypeError):
        return {}  # names that only a type checker knows


def _typed(value: Any, parameter: inspect.Parameter, hint: Any, field: str) -> Any:
    if value is None and parameter.default is None:
        return None
    try:
        return TypeAdapter(hint).validate_python(value)
    except (PydanticSchemaGenerationError, PydanticUserError):
        return value  # a type that pydantic does not know
    except ValidationError as error:
        message = error.errors(include_url=False, include_context=False)[0]["msg"]
        raise UserError(f"{field} = {value!r}: {message[0].lower()}{message[1:]}") from None


def _hidden(module: str) -> str | None:
    """A hint that an installed module of the same name hides the user's file; None if none does."""
    top = module.partition(".")[0]
    origin = getattr(getattr(sys.modules.get(top), "__spec__", None), "origin", None)
    for folder in FOLDERS:
        for place in (folder / f"{top}.py", folder / top / "__init__.py"):
            if place.is_file() and origin is not None and place != Path(origin):
                return f"{place} is hidden by {origin}: give it another name"
    return None


def _near(name: str, names: Iterable[str]) -> str:
    near = nearest(name, names)
    return f"did you mean {near}? " if near else ""


def _where(error: BaseException) -> str:
    """The line in which a module failed while it was imported."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    if isinstance(error, SyntaxError) or not frames:
        return "fix it there"
    return f"fix it in line {frames[-1].lineno} of {frames[-1].filename}"


def _announced(group: str | None) -> Iterable[EntryPoint]:
    return entry_points(group=group) if group else ()


def _allowed(builtin: Iterable[str], group: str | None) -> str:
    names = [*builtin, *sorted({point.name for point in _announced(group)})]
    known = f"{', '.join(names)}, or " if names else ""
    return f"allowed: {known}module:object of your own, in a module beside the configuration or installed"
