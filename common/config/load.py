"""Reads the configuration: file, then `SPO__SECTION__KEY` from the environment, then `-o section.key=value`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import ValidationError

from common.config.combinations import check_combinations
from common.config.run import Config
from common.config.section import explain
from common.errors import UserError
from common.files import near_file
from common.model import exported_model, is_run_folder
from common.network import without_password
from common.plugins import use_modules

ENV_PREFIX = "SPO__"
SUFFIXES = (".yaml", ".yml")
MOST_REPEATED = 100_000  # values that all aliases together may expand to
TIMESTAMP = "tag:yaml.org,2002:timestamp"
# YAML's numbers, in which `_` may only stand between groups of three digits.
NUMBER_PATTERNS = {
    "tag:yaml.org,2002:int": r"[-+]?(?:0x[0-9a-fA-F]+|0o?[0-7]+|[1-9][0-9]{0,2}(?:_[0-9]{3})+|[1-9][0-9]*|0)",
    "tag:yaml.org,2002:float": r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|"
    r"\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
}
# PyYAML's messages for a line that begins in the wrong column.
INDENTATION = re.compile("expected <block end>|mapping values are not allowed|could not find expected")


class ConfigLoader(yaml.SafeLoader):
    """YAML in which `0.5_2`, a band of ratios, is text, which YAML 1.1 reads as the number 0.52; so is `2026-11-30`.

    A key that is given twice in a mapping is an error, because one of the two values would silently be lost. Aliases
    that expand to too many values, or that contain themselves, are errors, because a few lines could fill any memory.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (*NUMBER_PATTERNS, TIMESTAMP)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._sizes: dict[yaml.Node, int] = {}  # number of values in each node, its aliases expanded
        self._repeated = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        alias = self.peek_event() if self.check_event(yaml.AliasEvent) else None
        node = super().compose_node(parent, index)
        if node is None:
            return None
        if alias is None:
            children = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
            self._sizes[node] = 1 + sum(self._sizes[child] for child in ([] if isinstance(children, str) else children))
            return node
        self._repeated += self._sizes.get(node, MOST_REPEATED + 1)  # a node has no size yet if the alias is inside it
        if self._repeated > MOST_REPEATED:
            problem = f"its aliases expand to more than {MOST_REPEATED:,} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=alias.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)  # type: ignore[no-untyped-call]
        except (ValueError, LookupError, AttributeError):  # a value that does not fit its tag, such as `!!int many`
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"{str(node.value)[:40]!r} cannot be read as {kind}", problem_mark=node.start_mark
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            # `<<` merges another mapping in, and may be given several times.
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1  # type: ignore[no-untyped-call]
            if not isinstance(key, str):
                continue
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is already on line {seen[key]}", problem_mark=key_node.start_mark
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


for _tag, _pattern in NUMBER_PATTERNS.items():
    ConfigLoader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list("-+0123456789."))


def parse_yaml(text: str) -> Any:
    """Parse a YAML text; raises `yaml.YAMLError`."""
    try:
        return yaml.load(text, ConfigLoader)
    except RecursionError:
        raise yaml.YAMLError("its lists or mappings are nested too deep") from None


def read_tree(path: Path) -> dict[str, Any]:
    """The sections of a configuration file, unchecked; raises `UserError` if the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a UTF-8 text file"
        raise UserError(f"cannot read configuration {path}: {reason}{_near_configuration(path, error)}") from None
    try:
        tree = parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error)
        hint = "; check the indentation of this line and those above it" if INDENTATION.search(reason) else ""
        hint = "; indent by spaces, not by tabs" if "'\\t'" in reason else hint
        raise UserError(f"configuration {path}{where} is not valid YAML: {reason}{hint}") from None
    if not isinstance(tree, dict):
        raise UserError(f"configuration {path} must be a mapping of sections ({', '.join(Config.model_fields)})")
    return tree


def _near_configuration(path: Path, error: Exception) -> str:
    """A hint at the file that was probably meant; may be empty."""
    if isinstance(error, FileNotFoundError):
        return near_file(path, SUFFIXES)
    inside = [file for file in sorted(path.glob("*.y*ml")) if file.is_file()] if os.path.isdir(path) else []
    if inside:
        return f"; did you mean {' or '.join(map(str, inside[:3]))}?"
    return "; give a YAML file, not a folder" if os.path.isdir(path) else ""


Overrides = Sequence[str] | Mapping[str, Any]


def load_config(path: str | Path, overrides: Overrides = (), environ: Mapping[str, str] | None = None) -> Config:
    """Read and check a run's configuration.

    Args:
        overrides: texts `section.key=value`, or values by key.

    Raises:
        UserError: the file cannot be read, a key is unknown or mistyped, or values cannot work together.
    """
    path = Path(path)
    tree = read_tree(path)
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
        # A user may forget what the environment sets.
        named = [name for key, name in variables.items() if re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", str(error))]
        raise UserError(f"{error} (set by {', '.join(named)} in the environment)" if named else str(error)) from None
    config = _with_export(config)
    modules = path.absolute().parent if config.run.modules is None else Path(config.run.modules).absolute()
    use_modules(modules)
    return config.model_copy(update={"run": config.run.model_copy(update={"modules": str(modules)})})


def _with_export(config: Config) -> Config:
    """The configuration with a model folder as `model.path`, where that is a run folder or a checkpoint.

    A run that has begun keeps the export that it began with, although its run folder may have a newer one.
    """
    given = Path(config.model.path)
    path = exported_model(config.model.path)
    if is_run_folder(given):
        with suppress(OSError, ValueError, yaml.YAMLError, LookupError, TypeError):
            before = parse_yaml((config.run.folder / "config.yaml").read_text(encoding="utf-8"))["model"]["path"]
            path = before if Path(before).is_relative_to(given.absolute()) else path
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def read_values(path: Path) -> dict[str, Any]:
    """The values of a run's saved configuration under today's keys; unchanged if this release cannot read them."""
    tree = read_tree(path)
    try:
        return parse_config(tree).model_dump(mode="json", by_alias=True)
    except UserError:
        return tree


def changed_config(config: Config, overrides: Overrides) -> Config:
    """A checked configuration with other values, checked again; raises `UserError` like `load_config`."""
    tree = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    override(tree, overrides)
    return parse_config(tree)


def as_texts(values: Mapping[str, str | int]) -> list[str]:
    """Overrides `section.key=value` that set these values: a text stays a text, even if it looks like a number."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]


def override(tree: dict[str, Any], overrides: Overrides) -> None:
    """Apply overrides to an unchecked configuration; raises `UserError`."""
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            _set(tree, key.split("."), str(value) if isinstance(value, Path) else value, source=f"override {key!r}")
        return
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
        raise UserError(explain(error, tree, Config)) from None
    check_combinations(config)
    return config


def _assign(tree: Any, keys: list[str], text: str, source: str) -> None:
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        value = text
    _set(tree, keys, value, source)


def _set(tree: Any, keys: list[str], value: Any, source: str) -> None:
    for depth, key in enumerate(keys[:-1]):
        if isinstance(tree, dict) and tree.get(key) is None:
            tree[key] = {}  # also if the file sets the section to null
        child: Any = tree[key] if isinstance(tree, dict) else _item(tree, key)
        if not isinstance(child, dict | list):
            raise UserError(f"{source}: {'.'.join(keys[: depth + 1])} is a value, not a section")
        tree = child
    if isinstance(tree, list):
        raise UserError(f"{source}: {'.'.join(keys[:-1])} is a list; set a key of one of its items, or the whole list")
    tree[keys[-1]] = value


def _item(items: list[Any], key: str) -> Any:
    """The item of a list that a key names: by its `name`, or by its position from 0; None if there is none."""
    named = [item for item in items if isinstance(item, dict) and item.get("name") == key]
    return named[0] if named else items[int(key)] if key.isdecimal() and int(key) < len(items) else None
