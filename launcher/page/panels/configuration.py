"""The panel about a run's configuration, its changes, and the software versions of its processes."""

from __future__ import annotations

from typing import Any

from launcher.folder.run import Run
from launcher.folder.settings import differing, setting
from launcher.page.charts import panel, table

MACHINE = ("python", "redis_server", "commit", "platform", "cores", "gpus")


def configuration_panel(run: Run) -> dict[str, Any]:
    """Tables of all keys, of those that differ from the defaults, of changes during the run, and of versions."""
    changes = [
        [str(change.get("step", "")), change["key"], setting(change.get("from")), setting(change.get("to"))]
        for change in run.changes
    ]
    changed = [[key, setting(value), setting(default)] for key, (value, default) in differing(run.values).items()]
    keys = [[key, setting(value)] for key, value in run.values.items()]
    unreadable = "The run folder has no readable config.yaml."
    charts = [
        table("changes", "Changes since the run began", ("after step", "key", "from", "to"), changes,
              "None: the configuration is the one with which the run began."),
        table("differing", "Differences from the defaults", ("key", "here", "default"), changed, unreadable),
        table("keys", "Configuration", ("key", "value"), keys, unreadable),
        table("versions", "Versions", ("of", "version"), version_rows(run.versions),
              "No process has recorded its versions yet (`versions.jsonl`)."),
    ]  # fmt: skip
    return panel("configuration", "Configuration", charts)


def version_rows(entries: list[dict[str, Any]]) -> list[list[str]]:
    """One row for each package: its version, or the version of each process if they differ.

    If a process was restarted with another version, the row has both.
    """
    by_process: dict[str, dict[str, list[str]]] = {}
    for entry in entries:
        seen = by_process.setdefault(str(entry.get("process", "?")), {})
        packages = entry.get("packages")
        values = {name: entry.get(name) for name in MACHINE} | (packages if isinstance(packages, dict) else {})
        for name, value in values.items():
            text = ", ".join(map(str, value)) if isinstance(value, list) else "–" if value in (None, "") else str(value)
            versions = seen.setdefault(str(name), [])
            if versions[-1:] != [text]:
                versions.append(text)
    names = {name for seen in by_process.values() for name in seen}
    first = [name for name in ("spo-trainer", *MACHINE) if name in names]
    rows = []
    for name in [*first, *sorted(names - set(first))]:
        processes: dict[str, list[str]] = {}  # by version
        for process, seen in by_process.items():
            processes.setdefault(", then ".join(seen.get(name, ["–"])), []).append(process)
        parts = [text if len(processes) == 1 else f"{', '.join(of)}: {text}" for text, of in processes.items()]
        rows.append([name.replace("_", " "), "; ".join(parts)])
    return rows
