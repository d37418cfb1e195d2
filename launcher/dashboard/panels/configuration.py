"""The configuration of a run, and what of it has changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from common.network import without_password
from launcher.dashboard.charts import panel, table
from launcher.folder.version_table import version_table


def configuration_panel(
    config: Mapping[str, Any], changes: list[dict[str, Any]], versions: list[dict[str, Any]]
) -> dict[str, Any]:
    """Every key with its value; changes with the step after which they hold; what each process runs with."""
    rows = [[str(change.get("step", "")), str(change["key"]), _text(change.get("from")), _text(change.get("to"))]
            for change in changes]  # fmt: skip
    charts = [
        table("changes", "What has changed since the run began", ("after step", "key", "from", "to"), rows,
              "Nothing: the configuration is the one the run began with."),
        table("keys", "Configuration", ("key", "value"), [[key, _text(value)] for key, value in flat(config)],
              "There is no config.yaml in the run folder that can be read."),
        table("versions", "Versions", ("of", "version"), _version_rows(versions),
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


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots between their parts."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: Any) -> str:
    return without_password(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
