"""What a tracker is, and which there are."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from common.config import Config
from sampler.metrics_file import Entry


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
