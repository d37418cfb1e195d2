"""What a tracker is, which there are, and names for those that have one list of metrics for a whole run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from common.config import Config
from common.config.shared import without_secrets
from sampler.metrics_file import Entry

OWN = "process/"  # what each process measures of itself


class Tracker(Protocol):
    """One run in a tracker. Any of its methods may raise; then they are called again later.

    Attributes:
        id: by which the same run is continued after a restart.
        settles: seconds after which what was logged is kept even if this process is killed.
    """

    id: str
    settles: float

    def log(self, entries: Sequence[Entry]) -> None:
        """Send entries, in their order."""

    def discard(self, version: int) -> None:
        """Later versions will be made again."""

    def close(self, finished: bool) -> None:
        """Send what is left, and end; `finished`: the run is over."""


def open_tracker(name: str, config: Config, folder: Path, run_id: str) -> Tracker:
    """Open the run's own run in a tracker, a new one where `run_id` is empty."""
    module = import_module(f"sampler.trackers.{name}_tracker")
    tracker: Tracker = module.open_tracker(config, folder, run_id)
    return tracker


def flat_name(process: str, name: str) -> str:
    """`reward/mean`; of what several processes measure, `generator-1/tokens_per_second`."""
    if process in ("sampler", "learner") and not name.startswith(OWN):
        return name
    return f"{process}/{name.partition('/')[2] or name}"


def flat_config(config: Config) -> dict[str, Any]:
    """`sampler.batch_size: 8`, a key a setting."""
    return {
        f"{section}.{key}": value
        for section, values in without_secrets(config).model_dump(mode="json", by_alias=True).items()
        for key, value in values.items()
    }
