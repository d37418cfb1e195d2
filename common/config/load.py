"""Reads the configuration: file, then `SPO__SECTION__KEY` from the environment, then `-o section.key=value`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from common.config.check import check_combinations
from common.config.explain import explain
from common.config.modules import use_modules
from common.config.paths import same, with_absolute_paths
from common.config.secrets import secrets, without_secrets
from common.config.sections import Config
from common.config.yaml_loader import ConfigLoader
from common.errors import UserError
from common.network import without_password

ENV_PREFIX = "SPO__"


def load_config(path: str | Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """Read and check a run's configuration.

    Raises:
        UserError: the file cannot be read, a key is unknown or mistyped, or values cannot work together.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a UTF-8 text file"
        raise UserError(f"cannot read configuration {path}: {reason}") from None
    try:
        tree = yaml.load(text, ConfigLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"configuration {path}{where} is not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"configuration {path} must be a mapping of sections ({', '.join(Config.model_fields)})")
    # In this order a whole mapping comes before single keys of it (SPO__A__B, then SPO__A__B__C).
    variables = {}
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX):
            keys = name[len(ENV_PREFIX) :].lower().split("__")
            _assign(tree, keys, value, source=name)
            variables[".".join(keys)] = name
    override(tree, overrides)
    try:
        config = parse_config(tree)
    except UserError as error:
        # Nobody looks for the cause in the environment.
        named = [name for key, name in variables.items() if key in str(error)]
        raise UserError(f"{error} (set by {', '.join(named)} in the environment)" if named else str(error)) from None
    return config.model_copy(update={"run": use_modules(config.run, path.absolute().parent)})


def override(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set `section.key=value` in a configuration that is still a mapping; raises `UserError`."""
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UserError(f"override {without_password(item)!r} is not of the form section.key=value")
        _assign(tree, key.strip().split("."), value, source=f"-o {key.strip()}")


def parse_config(tree: Mapping[str, Any]) -> Config:
    """Check a configuration that is already a mapping; raises `UserError` like `load_config`."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(explain(error, tree)) from None
    check_combinations(config)
    return config


def dump_config(config: Config, *, absolute: bool = False) -> str:
    """The resolved configuration as YAML, every key spelled out, without secrets: those are named in a comment.

    Args:
        absolute: make relative paths absolute, for a file that is read from other folders too.
    """
    notes = [f"# {key} held a secret, which is not written here: give it again.\n" for key in secrets(config)]
    values = without_secrets(config).model_dump(mode="json", by_alias=True)
    if absolute:
        values = with_absolute_paths(values)
    return "".join(notes) + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def shared_values(config: BaseModel) -> dict[str, Any]:
    """What all processes of a run have in common: the values of keys that are not local to a machine."""
    dumped, shared = config.model_dump(mode="json", by_alias=True), {}
    for name, field in type(config).model_fields.items():
        key, value = field.alias or name, getattr(config, name)
        if not _is_local(field):
            shared[key] = shared_values(value) if isinstance(value, BaseModel) else dumped[key]
    return shared


def _is_local(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("local"))


@dataclass(frozen=True, slots=True)
class Difference:
    """A key in which a process differs from its run."""

    key: str
    here: Any
    there: Any

    def __str__(self) -> str:
        return f"{self.key} (here {self.here!r}, in the run {self.there!r})"


def differences(config: Config, others: Mapping[str, Any]) -> list[Difference]:
    """What differs between two processes of a run; keys local to a machine aside.

    Args:
        others: the other's configuration, as `shared_values` or a file gives it.
    """
    return list(_differences(config, others, ""))


def _differences(config: BaseModel, others: Mapping[str, Any], prefix: str) -> Iterator[Difference]:
    dumped = config.model_dump(mode="json", by_alias=True)
    for name, field in type(config).model_fields.items():
        if _is_local(field):
            continue
        key = field.alias or name
        value, other = getattr(config, name), others.get(key)
        if isinstance(value, BaseModel):
            yield from _differences(value, other if isinstance(other, Mapping) else {}, f"{prefix}{key}.")
        elif not same(f"{prefix}{key}", dumped[key], other):
            yield Difference(f"{prefix}{key}", dumped[key], other)


def _assign(tree: Any, keys: list[str], text: str, source: str) -> None:
    """Set one value given as text at a path of keys."""
    try:
        value = yaml.load(text, ConfigLoader)
    except yaml.YAMLError:
        value = text
    for depth, key in enumerate(keys[:-1]):
        if isinstance(tree, dict) and tree.get(key) is None:
            tree[key] = {}  # also a section that the file switches off
        child: Any = tree[key] if isinstance(tree, dict) else _item(tree, key)
        if not isinstance(child, dict | list):
            raise UserError(f"{source}: {'.'.join(keys[: depth + 1])} is a value, not a section")
        tree = child
    if isinstance(tree, list):
        raise UserError(f"{source}: {'.'.join(keys[:-1])} is a list; name a key of one of its items, or set all of it")
    tree[keys[-1]] = value


def _item(items: list[Any], key: str) -> Any:
    """The item of a list that a key names: by its `name`, or by its position from 0; None if there is none."""
    named = [item for item in items if isinstance(item, dict) and item.get("name") == key]
    return named[0] if named else items[int(key)] if key.isdecimal() and int(key) < len(items) else None
