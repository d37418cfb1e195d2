"""The configuration of a run, and what of it has changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from common.secret import without_password
from launcher.dashboard.charts import panel, table


def configuration_panel(config: Mapping[str, Any], changes: list[dict[str, Any]]) -> dict[str, Any]:
    """Every key with its value; changes with the step after which they hold."""
    rows = [[str(change.get("step", "")), str(change["key"]), _text(change.get("from")), _text(change.get("to"))]
            for change in changes]  # fmt: skip
    charts = [
        table("changes", "What has changed since the run began", ("after step", "key", "from", "to"), rows,
              "Nothing: the configuration is the one the run began with."),
        table("keys", "Configuration", ("key", "value"), [[key, _text(value)] for key, value in flat(config)],
              "There is no config.yaml in the run folder that can be read."),
    ]  # fmt: skip
    return panel("configuration", "Configuration", charts)


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots between their parts."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: Any) -> str:
    return without_password(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
