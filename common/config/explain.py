"""Values that do not fit the configuration's models, in words: which key, what was given, what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import ValidationError

from common.config.secrets import PLAIN
from common.config.sections import Config
from common.network import without_password

# Names of the two forms that `data.train` has; pydantic puts them into its paths.
FORMS = ("path", "list")
SECRETS = frozenset(".".join(key) for key in PLAIN)


def explain(error: ValidationError, tree: Mapping[str, Any], prefix: tuple[str, ...] = (), shown: str = "") -> str:
    """All problems of a configuration as one line.

    Args:
        tree: what was validated.
        prefix: section that `tree` is of; by default the whole configuration.
        shown: what to call that section; by default its keys, joined by dots.
    """
    return "; ".join(_explain(problem, tree, prefix, shown or ".".join(prefix)) for problem in error.errors())


def _explain(problem: Any, tree: Mapping[str, Any], prefix: tuple[str, ...], shown: str) -> str:
    location = [*_without_forms(problem["loc"])]
    key = _join(shown, _named(location, tree))
    if problem["type"] == "extra_forbidden":
        section, name = [*prefix, *location[:-1]], str(location[-1])
        siblings = _fields_at(section)
        near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
        at = key.removesuffix(name)
        hint = f"did you mean {at}{near[0]}?" if near else f"allowed: {', '.join(siblings)}"
        return f"unknown configuration key {key}; {hint}"
    if problem["type"] == "missing":
        return f"configuration key {key} is missing"
    if problem["type"] == "value_error":
        # Our own checks name the field and the value themselves.
        return f"configuration key {key}: {problem['ctx']['error']}"
    if problem["type"] == "model_type":
        fields = _fields_at([*prefix, *location])
        preset = f" (for a preset: {key}.preset={problem['input']})" if "preset" in fields else ""
        return (
            f"{key} = {problem['input']!r} is a section, not a value; give one of its keys: {', '.join(fields)}{preset}"
        )
    shown = "***" if key in SECRETS else without_password(repr(problem["input"]))
    return f"configuration key {key} = {shown}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _without_forms(location: Iterable[str | int]) -> Iterator[str | int]:
    """A path of keys and positions without the names of forms that stand behind `train` and `heldout`."""
    before: str | int = ""
    for part in location:
        if not (part in FORMS and before in ("train", "heldout")):
            yield part
        before = part


def _named(location: Iterable[str | int], tree: Any) -> str:
    """A path as a user writes it; an item of a list goes by its name where it has one."""
    text = ""
    for part in location:
        try:
            tree = tree[part]
        except (LookupError, TypeError):
            tree = None
        if isinstance(part, int):
            name = (tree.get("name") or tree.get("path")) if isinstance(tree, Mapping) else None
            text += f"[{part if name is None else name}]"
        else:
            text = _join(text, part)
    return text


def _join(before: str, key: str) -> str:
    return f"{before}.{key}" if before and key else before or key


def _fields_at(location: Iterable[str | int]) -> list[str]:
    """Names of the keys allowed in a section."""
    model: Any = Config
    for part in location:
        if isinstance(part, str):
            field = next(field for name, field in model.model_fields.items() if part in (name, field.alias))
            model = section_of(field.annotation) or model
    return [field.alias or name for name, field in model.model_fields.items()]


def section_of(annotation: Any) -> Any:
    """The section that an annotation names, also where it is optional or a list's item; None if there is none."""
    if hasattr(annotation, "model_fields"):
        return annotation
    return next((section for option in get_args(annotation) if (section := section_of(option))), None)
