"""What the processes of a run run with, as each wrote it into `versions.jsonl` when it joined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.versions import FILE
from launcher.folder.appended_lines import AppendedLines

MACHINE = ("python", "redis_server", "commit", "platform", "cores", "gpus")


def recorded_versions(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The entry of each process that joined, and how many lines could not be read."""
    entries, unreadable = [], 0
    for _, line in AppendedLines(folder / FILE).read():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if isinstance(entry, dict):
            entries.append(entry)
        else:
            unreadable += 1
    return entries, unreadable


def version_table(versions: list[dict[str, Any]]) -> dict[str, Any]:
    """What the processes run with: those that run with the same share a column, named by all of them.

    Where one was started again with other versions than before, both are there.
    """
    by_process: dict[str, dict[str, list[str]]] = {}
    for entry in versions:
        seen = by_process.setdefault(str(entry.get("process", "?")), {})
        packages = entry.get("packages")
        for name, value in {name: entry.get(name) for name in MACHINE}.items():
            _note(seen, name, ", ".join(map(str, value)) if isinstance(value, list) else value)
        for name, value in packages.items() if isinstance(packages, dict) else ():
            _note(seen, str(name), value)
    columns: list[tuple[list[str], dict[str, list[str]]]] = []
    for process, seen in by_process.items():
        same = next((processes for processes, others in columns if others == seen), None)
        if same is None:
            columns.append(([process], seen))
        else:
            same.append(process)
    names = {name for seen in by_process.values() for name in seen}
    rows = [name for name in ("spo-trainer", *MACHINE) if name in names]
    rows += sorted(names - set(rows))
    return {
        "processes": [", ".join(processes) for processes, _ in columns],
        "rows": {
            name.replace("_", " "): [", then ".join(seen.get(name, ["–"])) for _, seen in columns] for name in rows
        },
    }


def _note(column: dict[str, list[str]], name: str, value: Any) -> None:
    seen = column.setdefault(name, [])
    text = "–" if value in (None, "") else str(value)
    if not seen or seen[-1] != text:
        seen.append(text)
