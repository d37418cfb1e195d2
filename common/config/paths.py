"""Keys that hold paths: absolute in what a run writes, so that it goes on from any folder; how they are compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILES = (
    "run.output_dir",
    "run.modules",
    "sampler.initial_values",
    "learner.weights.curve_dir",
    "sandbox.token_file",
    "broker.password_file",
)
# A folder or a file, if there is one; else a name on the Hugging Face hub, or one that we know.
FILES_OR_NAMES = ("model.path", "algorithm.reference", "data.train", "data.heldout")


def with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """A whole configuration as plain values, its paths made absolute from the current folder."""
    return _changed(values, "")


def same(key: str, here: Any, there: Any) -> bool:
    """Whether two processes of a run mean the same by a key.

    Of a path that one has from its own folder, and the other in full, the names they share must agree: machines may
    have the run's files in different places.
    """
    return here == there or (key in FILES + FILES_OR_NAMES and _same_path(here, there))


def _changed(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    changed = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            value = _changed(value, f"{key}.")
        elif key in FILES and value is not None:
            value = str(Path(value).absolute())
        elif key in FILES_OR_NAMES:
            value = _absolute_if_there(value)
        changed[name] = value
    return changed


def _absolute_if_there(value: Any) -> Any:
    if isinstance(value, list):
        return [{**source, "path": _absolute_if_there(source["path"])} for source in value]
    return str(Path(value).absolute()) if value is not None and Path(value).exists() else value


def _same_path(here: Any, there: Any) -> bool:
    if isinstance(here, str) and isinstance(there, str):
        shorter, longer = sorted((Path(here), Path(there)), key=lambda path: path.is_absolute())
        return here == there or (not shorter.is_absolute() and longer.parts[-len(shorter.parts) :] == shorter.parts)
    if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        return all(
            isinstance(one, dict)
            and isinstance(other, dict)
            and one | {"path": ""} == other | {"path": ""}
            and _same_path(one.get("path"), other.get("path"))
            for one, other in zip(here, there, strict=True)
        )
    return False
