"""The interface of a tracker, and metric names for trackers that have one flat list of metrics per run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np

from common.config import Config
from common.config.shared import without_secrets
from sampler.files.metrics_file import Entry

TRACKERS = {
    "tensorboard": "tensorboard_tracker:TensorBoardTracker",
    "wandb": "wandb_tracker:WandbTracker",
    "mlflow": "mlflow_tracker:MlflowTracker",
    "trackio": "trackio_tracker:TrackioTracker",
}
OWN = "process/"  # prefix of what each process measures about itself


class Tracker(ABC):
    """One run in a tracker. Any of its methods may raise; it is then called again later.

    Attributes:
        id: identifies the tracker's run, so that a restart continues it.
        settles: seconds after which logged entries survive a kill of this process.
    """

    id: str
    settles = 0.0

    @abstractmethod
    def __init__(self, config: Config, folder: Path, run_id: str) -> None:
        """Begin a run, or continue the one with this id."""

    @abstractmethod
    def log(self, entries: Sequence[Entry]) -> None: ...

    def log_samples(self, version: int, rows: list[list[Any]]) -> None:  # noqa: B027
        """Log a few episodes of a version's evaluation, in the columns of `sampler.trackers.samples`."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """Send the rest, and end; `finished` says whether the run is over."""

    def discard(self, version: int) -> None:  # noqa: B027
        """Drop later versions, which will be logged again; not needed if the later of two values counts."""


def open_tracker(name: str, config: Config, folder: Path, run_id: str) -> Tracker:
    """Open the tracker's run for this run; a new one if `run_id` is empty."""
    tracker: Tracker = resolve_name(f"sampler.trackers.{TRACKERS[name]}")(config, folder, run_id)
    return tracker


def flat_name(process: str, name: str) -> str:
    """A metric's name: `reward/mean`, or `generator-1/tokens_per_second` if several processes measure it."""
    if process in ("sampler", "learner") and not name.startswith(OWN):
        return name
    return f"{process}/{name.partition('/')[2] or name}"


def flat_values(entry: Entry, histogram: Callable[..., object]) -> dict[str, object]:
    """An entry's values by their flat names, and its histograms as the tracker's own, which are made like numpy's."""
    values: dict[str, object] = {flat_name(entry.process, name): value for name, value in entry.values.items()}
    for name, bins in entry.histograms.items():
        values[name] = histogram(np_histogram=(np.array(bins.counts), np.array(bins.edges)))
    return values


def flat_config(config: Config) -> dict[str, Any]:
    """The settings by their full keys, such as `sampler.batch_size`."""
    return {
        f"{section}.{key}": value
        for section, values in without_secrets(config).model_dump(mode="json", by_alias=True).items()
        for key, value in values.items()
    }
