"""The configuration of a run, what of it has changed, and what its processes run with."""

from __future__ import annotations

from typing import Any

from launcher.folder.run import Run
from launcher.folder.settings import differing, setting
from launcher.folder.versions import version_table
from launcher.page.charts import panel, table


def configuration_panel(run: Run) -> dict[str, Any]:
    """Every key with its value; what differs from the defaults; changes with the step after which they hold."""
    changes = [
        [str(change.get("step", "")), change["key"], setting(change.get("from")), setting(change.get("to"))]
        for change in run.folder.changes()
    ]
    changed = [[key, setting(value), setting(default)] for key, (value, default) in differing(run.values).items()]
    keys = [[key, setting(value)] for key, value in run.values.items()]
    unreadable = "There is no config.yaml in the run folder that can be read."
    charts = [
        table("changes", "What has changed since the run began", ("after step", "key", "from", "to"), changes,
              "Nothing: the configuration is the one the run began with."),
        table("differing", "What differs from the defaults", ("key", "here", "default"), changed, unreadable),
        table("keys", "Configuration", ("key", "value"), keys, unreadable),
        table("versions", "Versions", ("of", "version"), _version_rows(run.versions),
              "No process has written down yet what it runs with (`versions.jsonl`)."),
    ]  # fmt: skip
    return panel("configuration", "Configuration", charts)


def _version_rows(versions: list[dict[str, Any]]) -> list[list[str]]:
    """One row for each package: its version, or those of the processes where they differ."""
    computed_with = version_table(versions)
    return [
        [name, cells[0] if len(set(cells)) == 1 else
         "; ".join(f"{processes}: {cell}" for processes, cell in zip(computed_with["processes"], cells, strict=True))]
        for name, cells in computed_with["rows"].items()
    ]  # fmt: skip
