"""A run folder: finding it, and reading its small files. Missing or damaged files count as empty."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.config.load import parse_yaml
from common.errors import UserError, nearest
from common.versions import FILE as VERSIONS
from launcher.folder.appended_lines import AppendedLines
from launcher.folder.metrics import FILE

MOST_BYTES = 8 << 20  # that are read of a file
MARKS = ("config.yaml", FILE, "rollouts", "validation_data", "summary.json")
DEFAULT = Path("runs")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run folder, and a name that is unique among the runs that are shown."""

    path: Path
    name: str

    def config(self) -> dict[str, Any]:
        """The resolved configuration as a mapping; {} if it cannot be read."""
        try:
            tree = parse_yaml(_text(self.path / "config.yaml"))
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            return {}
        return tree if isinstance(tree, dict) else {}

    def changes(self) -> list[dict[str, Any]]:
        """Changes of the configuration, each with `step`, `key`, `from`, `to` and `time`."""
        changes = (mapping_of(line) for _, line in AppendedLines(self.path / "changes.jsonl").read())
        return [change for change in changes if isinstance(change.get("key"), str)]

    def versions(self) -> tuple[list[dict[str, Any]], int]:
        """The software versions of each process that joined, and how many lines could not be read."""
        entries = [mapping_of(line) for _, line in AppendedLines(self.path / VERSIONS).read()]
        return list(filter(None, entries)), entries.count({})

    def summary(self) -> dict[str, Any]:
        """The summary that `spo run` wrote when it ended; {} before that."""
        return _json_file(self.path / "summary.json")

    def audit(self) -> list[dict[str, Any]]:
        """The checks of `spo chaos`; empty for any other run."""
        checks = _json_file(self.path / "chaos.json").get("checks")
        return [check for check in checks if isinstance(check, dict)] if isinstance(checks, list) else []


def model_of(config: dict[str, Any]) -> str | None:
    """The model's folder or name in a configuration."""
    section = config.get("model")
    path = section.get("path") if isinstance(section, dict) else None
    return path if isinstance(path, str) else None


def is_locked(folder: Path) -> bool:
    """Whether the command that wrote the lock file is alive on this machine; does not touch the lock."""
    holder = _json_file(folder / "lock")
    pid = holder.get("pid")
    return holder.get("host") == socket.gethostname() and isinstance(pid, int) and Path(f"/proc/{pid}").exists()


def find_runs(arguments: Sequence[Path]) -> list[RunFolder]:
    """The run folders among the arguments and directly within them; without arguments, those in `runs/`.

    Raises:
        UserError: an argument does not exist or holds no run; the message names the nearest run folder.
    """
    folders: list[Path] = []
    for argument in arguments or [DEFAULT]:
        folder = argument.parent if argument.name == "config.yaml" else argument
        if is_run(folder):
            folders.append(folder)
        elif runs := sorted(filter(is_run, _subfolders(folder)), key=_age):
            folders += runs
        elif not arguments:
            raise UserError("there is no run folder in runs/: name one, for example `spo dashboard runs/quickstart-1`")
        else:
            raise UserError(_refusal(folder))
    return list(_named(list(dict.fromkeys(folder.resolve() for folder in folders))))


def is_run(folder: Path) -> bool:
    """Whether a folder holds files of a run, which may only just have started; not if it cannot be read."""
    try:
        return any((folder / mark).exists() for mark in (*MARKS, "lock", "logs"))
    except OSError:  # another account's, for example
        return False


def _refusal(folder: Path) -> str:
    try:
        is_folder = folder.is_dir()
        if is_folder:
            os.listdir(folder)
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}"
    if is_folder:
        return f"{folder} is not a run folder and holds none: it has none of {', '.join(MARKS)}"
    places = dict.fromkeys(place for place in (folder.parent, DEFAULT) if _is_folder(place))
    others = {path.name: path for place in places for path in _subfolders(place) if is_run(path)}
    if near := nearest(folder.name, others, 0.5):
        return f"{folder} does not exist; did you mean {others[near]}?"
    listed = f"; there are {', '.join(map(str, sorted(others.values())[:8]))}" if others else ""
    return f"{folder} does not exist{listed}"


def _named(folders: list[Path]) -> Iterator[RunFolder]:
    """Name each folder; equal names are extended by parent folders until they differ."""
    for folder in folders:
        parts = 1
        others = [other for other in folders if other != folder]
        while any(other.parts[-parts:] == folder.parts[-parts:] for other in others):
            parts += 1
        yield RunFolder(folder, "/".join(folder.parts[-parts:]))


def _subfolders(folder: Path) -> list[Path]:
    try:
        return list(filter(_is_folder, folder.iterdir()))
    except OSError:
        return []


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a link to where this account may not go
        return False


def _age(folder: Path) -> float:
    try:
        return -folder.stat().st_mtime
    except OSError:
        return 0.0


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MOST_BYTES).decode("utf-8")


def _json_file(path: Path) -> dict[str, Any]:
    try:
        return mapping_of(_text(path))
    except (OSError, ValueError):
        return {}


def mapping_of(text: str | bytes) -> dict[str, Any]:
    """The JSON object that a text holds; {} if it holds none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
