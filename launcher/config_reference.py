"""Describes the configuration's keys from its models: docs/configuration.md, and `spo config --explain`."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from common.config import Config
from common.config.names_elsewhere import ELSEWHERE, NAMES
from common.config.section import section_of
from common.config.shared import CHANGEABLE
from common.errors import UserError

Keys = Mapping[str, FieldInfo]

HEAD = """# Configuration

One YAML file for the whole run. Any key can be set on the command line (`-o learner.lr=1e-6`, several times)
and in the environment (`SPO__LEARNER__LR=1e-6`); the command line wins. Unknown keys are errors. `spo config FILE`
prints the resolved configuration. Keys marked *local* describe the machine a process runs on and may differ between
the processes of a run; all others must agree. Those marked *May change* can be given another value when a run is
started again ([how](operations.md#changing-a-run)); before the run's first step, all can.

This page is generated: `spo docs-config > docs/configuration.md`.
"""


def reference() -> str:
    pages = (line for one in sections() for line in _section(*one))
    return HEAD + "".join((*pages, *_names())).rstrip() + "\n"


def _names() -> Iterator[str]:
    yield "\n## Names of other trainers\n\nNames that are refused with a hint, in any section.\n\n"
    yield "| trainer | name | here |\n|---|---|---|\n"
    for trainer, names in NAMES.items():
        for name, today in sorted(names.items()):
            yield f"| {trainer} | `{name}` | {today if ' ' in today else f'`{today}`'} |\n"


def _section(title: str, model: type[BaseModel], keys: Mapping[str, FieldInfo]) -> Iterator[str]:
    yield f"\n## `{title}`\n\n{inspect.cleandoc(model.__doc__ or '')}\n\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|\n"
    for key, field in keys.items():
        yield f"| `{key}` | {_type(field)} | {_default(field)} | {_meaning(field, key)} |\n"


def sections(prefix: str = "", model: type[BaseModel] = Config) -> Iterator[tuple[str, type[BaseModel], Keys]]:
    """Every section that has keys: its name, its model, and the fields of its described keys by full name."""
    # A section whose keys have no descriptions is described on another page, and is one key here.
    inner = {name: one for name, field in model.model_fields.items() if (one := _one(field)) and _described(one)}
    plain = {name: field for name, field in model.model_fields.items() if field.description and name not in inner}
    if plain:
        keys = {f"{prefix}{field.alias or name}": field for name, field in plain.items()}
        yield prefix.rstrip("."), model, keys
    lists: dict[type[BaseModel], str] = {}
    for name, field in model.model_fields.items():
        if name in inner:
            yield from sections(f"{prefix}{name}.", inner[name])
        elif _one(field) is None and (nested := section_of(field.annotation)) is not None:
            lists.setdefault(nested, f"{prefix}{name}[].")
    for nested, at in lists.items():
        yield from sections(at, nested)


def explain(key: str) -> str:
    """Describe a key (type, default, meaning), or list the keys of a section with the first sentence on each.

    Raises `UserError` if there is no such key; it names the nearest.
    """
    fields = _fields()
    if key in fields:
        field = fields[key]
        pages = dict.fromkeys([*re.findall(r"docs/[\w-]+\.md", field.description or ""), "docs/configuration.md"])
        lines = {"type": _type(field), "default": _default(field), "meaning": _meaning(field, key)}
        lines["documented in"] = ", ".join(pages)
        return "".join(f"{name:14}{_plain(text)}\n" for name, text in {"key": key, **lines}.items())
    if inside := [one for one in fields if one.startswith((f"{key}.", f"{key}[]."))]:
        return "".join(map(_line, inside))
    last = key.rpartition(".")[2]
    by_last = {one.rpartition(".")[2]: one for one in fields}
    same = ", ".join(one for one in fields if one.rpartition(".")[2] == last)
    near = get_close_matches(key, fields, 3, 0.7) or map(by_last.get, get_close_matches(last, by_last, 3, 0.5))
    hint = same or ELSEWHERE.get(key) or ELSEWHERE.get(last) or ", ".join(filter(None, near))
    raise UserError(f"--explain {key}: there is no such key; {f'nearest: {hint}' if hint else '--search finds words'}")


def search(word: str) -> str:
    """The keys with a word in their name or meaning, and the first sentence on each; raises `UserError` if none has."""
    wanted = word.casefold()
    lines = [_line(key) for key, one in _fields().items() if wanted in f"{key} {one.description}".casefold()]
    if not lines:
        raise UserError(f"--search {word}: no key has this in its name or meaning")
    return "".join(lines)


def _fields() -> dict[str, FieldInfo]:
    return {key: field for _, _, keys in sections() for key, field in keys.items()}


def _line(key: str) -> str:
    meaning = _plain(_meaning(_fields()[key], key))
    return f"{key:38}  {re.split(r'(?<=[.;:]) ', meaning)[0].rstrip(';:')}\n"


def _plain(text: str) -> str:
    """The text of a Markdown cell without its markup."""
    return re.sub(r"\*([\w ]+\.?)\*", r"\1", text.replace("\\|", "|").replace("`", ""))


def _one(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that holds a section, or a section or null; None for any other field."""
    options = (field.annotation, *get_args(field.annotation))
    return next((option for option in options if hasattr(option, "model_fields")), None)


def _described(section: type[BaseModel]) -> bool:
    return any(field.description for field in section.model_fields.values())


def _type(field: FieldInfo) -> str:
    shown = _name(field.annotation)
    limits = [
        f"{sign} {value:g}"
        for item in field.metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if (value := getattr(item, attribute, None)) is not None
    ]
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


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    return f"`{json.dumps(value)}`"


def _meaning(field: FieldInfo, key: str) -> str:
    extra = field.json_schema_extra
    local = " *Local.*" if isinstance(extra, dict) and extra.get("local") else ""
    return (field.description or "").replace("|", "\\|") + local + (" *May change.*" if key in CHANGEABLE else "")
