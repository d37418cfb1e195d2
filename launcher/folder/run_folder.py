"""A run folder: what stands in its files but for metrics and episodes. Whatever is missing or damaged is left out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError
from launcher.folder.appended_lines import AppendedLines
from launcher.folder.metrics import FILE, Metrics
from launcher.folder.processes import is_locked

RECENT = 90.0  # seconds without an entry after which a run counts as stopped
MOST_BYTES = 8 << 20  # of a file that is read whole
MARKS = ("config.yaml", FILE, "rollouts", "validation_data", "tensorboard", "summary.json")
DEFAULT = Path("runs")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run by its folder, and the name that tells it from the others that are shown."""

    path: Path
    name: str

    def config(self) -> dict[str, Any]:
        """The resolved configuration as a mapping; {} where it cannot be read."""
        try:
            tree = yaml.load(_text(self.path / "config.yaml"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            return {}
        return tree if isinstance(tree, dict) else {}

    def changes(self) -> list[dict[str, Any]]:
        """What of the configuration has changed: `step`, `key`, `from`, `to` and `time` of each change."""
        changes = []
        for _, line in AppendedLines(self.path / "changes.jsonl").read():
            try:
                change = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(change, dict) and isinstance(change.get("key"), str):
                changes.append(change)
        return changes

    def summary(self) -> dict[str, Any]:
        """What `spo run` wrote when it ended; {} before that."""
        try:
            summary = json.loads(_text(self.path / "summary.json"))
        except (OSError, ValueError, RecursionError):
            return {}
        return summary if isinstance(summary, dict) else {}

    def books(self, metrics: Metrics) -> dict[str, int]:
        """The run's counters by name: those of the metrics, or, of a run that is over, those of its summary."""
        books = {
            name.removeprefix("samples/"): int(value)
            for name in metrics.names("sampler")
            if name.startswith("samples/") and not name.endswith("per_second")
            and (value := metrics.last(name, "sampler")) is not None and value == value
        }  # fmt: skip
        counters = self.summary().get("counters")
        if isinstance(counters, dict):
            for name, value in counters.items():
                if isinstance(value, int):
                    books[name] = max(value, books.get(name, 0))
        return books

    def steps(self) -> int | None:
        """How many steps the run is to make; None where its configuration cannot be read."""
        run = self.config().get("run")
        steps = run.get("steps") if isinstance(run, dict) else None
        return steps if isinstance(steps, int) else None

    def state(self, metrics: Metrics) -> str:
        """`finished`, `going on`, `stopped`, or `empty` where nothing has been written yet."""
        newest = max((metrics.last_time(process) or 0.0 for process in metrics.processes()), default=0.0)
        summary = self.path / "summary.json"
        try:
            is_over = summary.stat().st_mtime >= newest - 1.0
        except OSError:
            is_over = False
        if is_over:
            return "finished" if self.summary().get("finished") else "stopped"
        if is_locked(self.path) or newest > time.time() - RECENT:
            return "going on"
        return "stopped" if newest else "empty"


def find_runs(arguments: Sequence[Path]) -> list[RunFolder]:
    """The run folders that are named; of a folder that holds some, those. Without arguments, those of `runs/`.

    Raises:
        UserError: one does not exist or is no run folder; the message names the nearest one.
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
    """Whether a folder holds anything of a run, which may still be making its model."""
    return any((folder / mark).exists() for mark in (*MARKS, "lock", "logs"))


def _refusal(folder: Path) -> str:
    if folder.is_dir():
        return f"{folder} is no run folder, nor does it hold one: it has none of {', '.join(MARKS)}"
    places = dict.fromkeys(place for place in (folder.parent, DEFAULT) if place.is_dir())
    others = {path.name: path for place in places for path in _subfolders(place) if is_run(path)}
    nearest = get_close_matches(folder.name, others, n=1, cutoff=0.5)
    hint = f"; did you mean {others[nearest[0]]}?" if nearest else ""
    listed = f"; there are {', '.join(map(str, sorted(others.values())[:8]))}" if others and not nearest else ""
    return f"{folder} does not exist{hint or listed}"


def _named(folders: list[Path]) -> Iterator[RunFolder]:
    """Each with its name; those of the same name with as many folders above as tell them apart."""
    for folder in folders:
        parts = 1
        others = [other for other in folders if other != folder]
        while any(other.parts[-parts:] == folder.parts[-parts:] for other in others):
            parts += 1
        yield RunFolder(folder, "/".join(folder.parts[-parts:]))


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


def _age(folder: Path) -> float:
    try:
        return -folder.stat().st_mtime
    except OSError:
        return 0.0


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MOST_BYTES).decode("utf-8")
