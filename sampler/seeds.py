"""Seeds of tasks."""

from __future__ import annotations

import zlib

from common.config import RunConfig


def task_seed(run: RunConfig, name: str) -> int | None:
    """A task's seed, by its name; None unless the run is deterministic, since vLLM samples more slowly with seeds."""
    return zlib.crc32(f"{run.seed} {name}".encode()) if run.deterministic else None
