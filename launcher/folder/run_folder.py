"""A run folder: its files but for metrics and episodes. Whatever is missing or damaged there is left out."""

from __future__ import annotations

import json
import socket
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

RECENT = 90.0  # seconds without an entry after which a run counts as stopped
MOST_BYTES = 8 << 20  # of a file that is read whole
MARKS = ("config.yaml", FILE, "rollouts", "validation_data", "summary.json")
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
        """Changes of the configuration: `step`, `key`, `from`, `to` and `time` of each."""
        changes = (_json(line) for _, line in AppendedLines(self.path / "changes.jsonl").read())
        return [change for change in changes if isinstance(change.get("key"), str)]

    def summary(self) -> dict[str, Any]:
        """What `spo run` wrote when it ended; {} before that."""
        try:
            return _json(_text(self.path / "summary.json"))
        except (OSError, ValueError):
            return {}

    def audit(self) -> list[dict[str, Any]]:
        """The checks of `spo chaos`, if the run was one of its runs."""
        try:
            checks = _json(_text(self.path / "chaos.json")).get("checks")
        except (OSError, ValueError):
            return []
        return [check for check in checks if isinstance(check, dict)] if isinstance(checks, list) else []

    def counters(self, metrics: Metrics) -> dict[str, int]:
        """The run's counters by name: those of the metrics, and, where it is over, those of its summary."""
        counters = {
            name.removeprefix("samples/"): int(value)
            for name in metrics.names("sampler")
            if name.startswith("samples/") and not name.endswith("per_second")
            and (value := metrics.last(name, "sampler")) is not None and value == value
        }  # fmt: skip
        final = self.summary().get("counters")
        for name, value in final.items() if isinstance(final, dict) else ():
            if isinstance(value, int):
                counters[name] = max(value, counters.get(name, 0))
        return counters

    def steps(self) -> int | None:
        """How many steps the run is to make; None where its configuration cannot be read."""
        run = self.config().get("run")
        steps = run.get("steps") if isinstance(run, dict) else None
        return steps if isinstance(steps, int) else None

    def final_summary(self, metrics: Metrics) -> dict[str, Any]:
        """The summary, unless it is of an earlier start and the run has gone on since."""
        summary = self.summary()
        newest = max(map(metrics.last_time, metrics.processes()), default=0.0)
        try:
            is_newest = (self.path / "summary.json").stat().st_mtime >= newest - 1.0
        except OSError:
            return {}
        steps, trained = summary.get("steps"), metrics.last_version("learner") or 0
        return summary if is_newest and not (isinstance(steps, int) and trained > steps) else {}

    def state(self, metrics: Metrics) -> str:
        """`finished`, `going on`, `stopped`, or `empty` where nothing has been written yet."""
        summary, steps = self.final_summary(metrics), self.steps()
        if summary:
            # A run that is given more steps begins again where it had finished.
            has_all = not isinstance(steps, int) or summary.get("steps", steps) >= steps
            return "finished" if summary.get("finished") and has_all else "stopped"
        newest = max(map(metrics.last_time, metrics.processes()), default=0.0)
        if is_locked(self.path) or newest > time.time() - RECENT:
            return "going on"
        return "stopped" if newest else "empty"


def model_of(config: dict[str, Any]) -> str | None:
    """The model's folder or name in a configuration."""
    section = config.get("model")
    path = section.get("path") if isinstance(section, dict) else None
    return path if isinstance(path, str) else None


def is_locked(folder: Path) -> bool:
    """Whether a command of this machine that holds the folder's lock lives. The lock itself is not touched."""
    try:
        holder = _json((folder / "lock").read_text(encoding="utf-8"))
        pid, host = holder["pid"], holder["host"]
    except (OSError, ValueError, LookupError):
        return False
    return host == socket.gethostname() and isinstance(pid, int) and Path(f"/proc/{pid}").exists()


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


def _json(text: str | bytes) -> dict[str, Any]:
    """A mapping; {} where the text holds none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
