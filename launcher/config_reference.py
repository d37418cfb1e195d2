"""Generates docs/configuration.md from the configuration's models."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from common.config import Config
from common.config.names_elsewhere import NAMES
from common.config.section import section_of
from common.config.shared import may_change

HEAD = """# Configuration

One YAML file for the whole run. Any key can be set on the command line (`-o learner.lr=1e-6`, several times)
and in the environment (`SPO__LEARNER__LR=1e-6`); the command line wins. Unknown keys are errors. `spo config FILE`
prints the resolved configuration. Keys marked *local* describe the machine a process runs on and may differ between
the processes of a run; all others must agree. Those marked *May change* can be given another value when a run is
started again ([how](operations.md#changing-a-run)); before the run's first step, all can.

This page is generated: `spo docs-config > docs/configuration.md`.
"""


def reference() -> str:
    return HEAD + "".join((*_section("", Config), *_names())).rstrip() + "\n"


def _names() -> Iterator[str]:
    yield "\n## Names of other trainers\n\nNames that are refused with a hint, in any section.\n\n"
    yield "| trainer | name | here |\n|---|---|---|\n"
    for trainer, names in NAMES.items():
        for name, today in sorted(names.items()):
            yield f"| {trainer} | `{name}` | {today if ' ' in today else f'`{today}`'} |\n"


def _section(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    # A section whose keys have no descriptions is described on another page, and is one key here.
    sections = {name: one for name, field in model.model_fields.items() if (one := _one(field)) and _described(one)}
    plain = {name: field for name, field in model.model_fields.items() if field.description and name not in sections}
    if plain:
        yield f"\n## `{prefix.rstrip('.')}`\n\n{inspect.cleandoc(model.__doc__ or '')}\n\n"
        yield "| key | type | default | meaning |\n|---|---|---|---|\n"
        for name, field in plain.items():
            key = f"{prefix}{field.alias or name}"
            yield f"| `{key}` | {_type(field)} | {_default(field)} | {_meaning(field, key)} |\n"
    lists: dict[type[BaseModel], str] = {}
    for name, field in model.model_fields.items():
        if name in sections:
            yield from _section(f"{prefix}{name}.", sections[name])
        elif _one(field) is None and (nested := section_of(field.annotation)) is not None:
            lists.setdefault(nested, f"{prefix}{name}[].")
    for nested, at in lists.items():
        yield from _section(at, nested)


def _one(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, which may be null; None if it holds none, or a list of sections."""
    options = (field.annotation, *get_args(field.annotation))
    return next((option for option in options if hasattr(option, "model_fields")), None)


def _described(section: type[BaseModel]) -> bool:
    return any(field.description for field in section.model_fields.values())


def _type(field: FieldInfo) -> str:
    shown = _name(field.annotation)
    limits = [text for item in field.metadata for text in _limits(item)]
    return f"{shown}, {', '.join(limits)}" if limits else shown


def _name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " \\| ".join(f"`{value}`" for value in get_args(annotation))
    if annotation is type(None):
        return "`null`"
    if isinstance(annotation, type) and not get_args(annotation):
        return "section" if issubclass(annotation, BaseModel) else annotation.__name__
    if get_origin(annotation) in (list, dict, tuple):
        inner = ", ".join(_name(argument) for argument in get_args(annotation))
        return f"{get_origin(annotation).__name__} of {inner}"
    if get_origin(annotation) is Annotated:
        return _name(get_args(annotation)[0])
    arguments = get_args(annotation)
    return " or ".join(_name(argument) for argument in arguments) if arguments else "any"


def _limits(item: Any) -> Iterator[str]:
    for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        value = getattr(item, attribute, None)
        if value is not None:
            yield f"{sign} {value:g}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    return f"`{json.dumps(value)}`"


def _meaning(field: FieldInfo, key: str) -> str:
    extra = field.json_schema_extra
    local = " *Local.*" if isinstance(extra, dict) and extra.get("local") else ""
    return (field.description or "").replace("|", "\\|") + local + (" *May change.*" if may_change(key) else "")
