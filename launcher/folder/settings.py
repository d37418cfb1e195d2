"""The configuration in a run folder as a flat mapping by key, and the defaults of this release to compare it with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from common.config import Config, parse_config
from common.network import without_password

# These keys say what a run is called and where it is, not what it does.
NAMES = ("run.name", "run.experiment", "run.output_dir", "run.modules", "broker.url")
REQUIRED = ("model.path", "data.train")
RUN_FOLDER = "RUN"
NOT_SET = object()


def settings(values: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Values by key (`learner.lr`), in the order of the file.

    Args:
        values: a whole configuration as plain values, perhaps written by another release.
        folder: the run folder; paths in it begin with `RUN`, so that they can be compared with another run's.
    """
    roots = () if folder is None else _roots(values, folder)
    return {key: _shortened(value, roots) for key, value in _flat(values, Config, "")}


@cache
def defaults() -> dict[str, Any]:
    """The default of every key; `NOT_SET` for the required ones."""
    config = parse_config({"model": {"path": "model"}, "data": {"train": "train.jsonl"}})
    return settings(config.model_dump(mode="json", by_alias=True)) | dict.fromkeys(REQUIRED, NOT_SET)


def differing(values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys that are not at their default, each with its value and default (`NOT_SET` if it has none)."""
    usual = defaults()
    both = {key: (value, usual.get(key, NOT_SET)) for key, value in values.items() if key not in NAMES}
    return {key: (value, default) for key, (value, default) in both.items() if value != default}


def setting(value: Any) -> str:
    """A value of the configuration as text, without passwords."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return "must be given" if value is NOT_SET else without_password(text)


def _flat(values: Mapping[str, Any], model: type[BaseModel] | None, prefix: str) -> Iterator[tuple[str, Any]]:
    sections = _sections(model) if model else {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and (name in sections or model is None) and value:
            yield from _flat(value, sections.get(name), f"{key}.")
        else:
            yield key, value


def _sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The fields of a section that are themselves sections."""
    fields = {name: field.annotation for name, field in model.model_fields.items()}
    return {name: kind for name, kind in fields.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def _roots(values: Mapping[str, Any], folder: Path) -> tuple[Path, ...]:
    """The run folder as the configuration names it, and where it is now."""
    run = values.get("run")
    run = run if isinstance(run, dict) else {}
    return Path(str(run.get("output_dir", ""))) / str(run.get("experiment", "")), folder.absolute(), folder.resolve()


def _shortened(value: Any, roots: tuple[Path, ...]) -> Any:
    if isinstance(value, list):
        return [_shortened(item, roots) for item in value]
    if isinstance(value, dict):
        return {str(name): _shortened(item, roots) for name, item in value.items()}
    if isinstance(value, str):
        for root in roots:
            if root.parts and Path(value).is_relative_to(root):
                return str(Path(RUN_FOLDER) / Path(value).relative_to(root))
    return value
