"""Weights & Biases. `WANDB_MODE`, `WANDB_PROJECT`, `WANDB_BASE_URL` and the like have their usual effect."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from common.config import Config
from sampler.files.metrics_file import Entry
from sampler.trackers.base import Tracker, flat_config, flat_values
from sampler.trackers.samples import COLUMNS


class WandbTracker(Tracker):
    """One run, whose axis is the metric `version`: its own steps may only grow, and evaluations come late."""

    settles = 20.0  # it sends in the background

    def __init__(self, config: Config, folder: Path, run_id: str) -> None:
        self.id = run_id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "spo",
            name=config.run.experiment,
            id=self.id,
            resume="allow",
            dir=str(folder),
            config=flat_config(config),
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, init_timeout=60, allow_val_change=True
            ),
        )
        self._run.define_metric("version", hidden=True)
        self._run.define_metric("*", step_metric="version")

    def log(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._run.log(flat_values(entry, wandb.Histogram) | {"version": entry.version, "time": entry.time})

    def log_samples(self, version: int, rows: list[list[Any]]) -> None:
        table = wandb.Table(columns=list(COLUMNS), data=rows)
        self._run.log({"validation/samples": table, "version": version})

    def close(self, finished: bool) -> None:
        """Mark the run as finished, or as interrupted."""
        if not finished:
            self._run.mark_preempting()
        self._run.finish()
