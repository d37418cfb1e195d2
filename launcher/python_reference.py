"""Generates docs/python.md from the docstrings of the package `spo`."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from pydantic import BaseModel

HEAD = """# Python

`import spo` starts, reads, evaluates and exports runs in scripts and notebooks, such as
[this one](../examples/notebook.ipynb). The commands call the same functions. All names on this page follow semantic
versioning; others may change with any release. [Extending SPO](extending.md) describes parts of your own, such as
rewards and losses.

This page is generated: `spo docs-python > docs/python.md`.
"""
WIDTH = 100  # of a signature on one line
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example):$", re.MULTILINE)
TITLES = {"Args": "Arguments"}
ENTRY = re.compile(r"^([\w, ]+): ", re.MULTILINE)


def page(package: ModuleType) -> str:
    """The page of a package: its functions in the order of the source, then its classes by name."""
    public = {name: getattr(package, name) for name in package.__all__}
    functions = {name: public[name] for name in vars(package) if isinstance(public.get(name), FunctionType)}
    classes = {name: value for name, value in public.items() if inspect.isclass(value)}
    parts = [_entry(f"spo.{name}", value) for name, value in functions.items()]
    parts += [part for name, value in classes.items() for part in _class(name, value)]
    return "\n".join([HEAD, *parts])


def _entry(name: str, function: Callable[..., Any], level: str = "##") -> str:
    return f"{level} `{name}`\n\n```python\n{_signature(name, function)}\n```\n\n{_prose(function)}"


def _class(name: str, kind: type) -> Iterator[str]:
    yield f"## `spo.{name}`\n\n{_prose(kind)}"
    if issubclass(kind, BaseModel):  # its keys have a page of their own
        return
    for own, value in vars(kind).items():
        if own.startswith("_") or not inspect.getdoc(value):
            continue
        if isinstance(value, property):
            yield f"### `{name}.{own}`\n\n{_prose(value)}"
        elif isinstance(value, FunctionType):
            yield _entry(f"{name}.{own}", value, "###")


def _signature(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    words = [_parameter(one) for one in signature.parameters.values() if one.name != "self"]
    first = next((i for i, one in enumerate(signature.parameters.values()) if one.kind is one.KEYWORD_ONLY), None)
    if first is not None:
        words.insert(first, "*")
    end = f") -> {signature.return_annotation}"
    line = f"{name}({', '.join(words)}{end}"
    return line if len(line) <= WIDTH else "\n".join([f"{name}(", *(f"    {word}," for word in words), end])


def _parameter(one: inspect.Parameter) -> str:
    stars = "**" if one.kind is one.VAR_KEYWORD else ""
    default = json.dumps(one.default) if isinstance(one.default, str) else repr(one.default)
    if one.default is one.empty:
        return f"{stars}{one.name}: {one.annotation}"
    return f"{stars}{one.name}: {one.annotation} = {default}"


def _prose(described: Any) -> str:
    """A docstring as Markdown: its text, then each section under its name."""
    text, *sections = SECTION.split(inspect.getdoc(described) or "")
    parts = [text.strip()]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        body = textwrap.dedent(body.strip("\n")).strip()
        if title == "Example":
            parts.append(f"```python\n{body}\n```")
        elif title == "Returns":
            parts.append(f"**{title}** {body}")
        else:
            parts.append(f"**{TITLES.get(title, title)}**\n\n" + ENTRY.sub(r"- `\1`: ", body))
    return "\n\n".join(parts) + "\n"
