"""Trackio: on this machine, or a Space or server by `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trackio

from common.config import Config
from sampler.files.metrics_file import Entry
from sampler.trackers.base import Tracker, flat_config, flat_values
from sampler.trackers.samples import COLUMNS


class TrackioTracker(Tracker):
    """One run; its steps are the weight versions."""

    settles = 20.0  # it sends in the background

    def __init__(self, config: Config, folder: Path, run_id: str) -> None:
        self.id = run_id or f"{config.run.experiment}-{uuid.uuid4().hex[:6]}"
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or "spo",
            name=self.id,
            config=flat_config(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._run.log(flat_values(entry, trackio.Histogram), step=entry.version)

    def log_samples(self, version: int, rows: list[list[Any]]) -> None:
        table = trackio.Table(columns=list(COLUMNS), data=rows)
        self._run.log({"validation/samples": table}, step=version)

    def close(self, finished: bool) -> None:
        self._run.finish()
