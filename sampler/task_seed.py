"""Seeds of the sampling of single tasks."""

from __future__ import annotations

import zlib

from common.config import RunConfig


def task_seed(run: RunConfig, name: str) -> int | None:
    """Of the task with this name; None but in a deterministic run, since vLLM samples more slowly with seeds."""
    return zlib.crc32(f"{run.seed} {name}".encode()) if run.deterministic else None
