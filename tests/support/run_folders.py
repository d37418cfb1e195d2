"""Run folders with metrics in them, as the sampler writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_metrics(
    folder: Path,
    version: int,
    values: Mapping[str, float],
    process: str = "sampler",
    time: float = 1_700_000_000.0,
    histograms: Mapping[str, Any] | None = None,
) -> None:
    """Append an entry to the metrics of a run folder."""
    entry = {"time": time, "version": version, "process": process, "values": dict(values)}
    if histograms is not None:
        entry["histograms"] = dict(histograms)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
