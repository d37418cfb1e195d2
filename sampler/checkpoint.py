"""The tracker on disk beside each of the learner's checkpoints, for a run whose Redis is gone."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from sampler.drift import DriftMeter
from sampler.tracker import ValueTracker


def path_of(folder: Path, version: int) -> Path:
    """File of a version in the run's folder `checkpoints/tracker`, apart from the learner's own folders."""
    return folder / f"step_{version}.npz"


def save(path: Path, tracker: ValueTracker, meter: DriftMeter, keep: int) -> None:
    """Write the file whole or not at all, and remove all but the `keep` newest of its folder.

    Raises:
        UserError: the file cannot be written.
    """
    unfinished = path.with_suffix(".part")
    state: Any = tracker.state_dict() | {"answered": meter.answered, "moved": meter.moved_by_version()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            np.savez(file, **state)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise UserError(f"tracker checkpoint {path} cannot be written: {error.strerror}") from None
    for old in sorted(path.parent.glob("step_*.npz"), key=_version)[:-keep]:
        old.unlink(missing_ok=True)


def load(path: Path, tracker: ValueTracker, meter: DriftMeter) -> bool:
    """Restore tracker and meter from a file; False if there is none.

    Raises:
        UserError: the file cannot be read.
    """
    if not path.is_file():
        return False
    try:
        with np.load(path) as state:
            tracker.load_state_dict(state)
            meter.restore(state["moved"])
            for prompt_id, answered in zip(state["prompt_ids"].tolist(), state["answered"].tolist(), strict=True):
                i = tracker.index.get(prompt_id.decode())
                if i is not None:
                    meter.answered[i] = answered
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"tracker checkpoint {path} cannot be read: {error}; remove it to start without") from None
    return True


def _version(path: Path) -> int:
    digits = path.stem.rpartition("_")[2]
    return int(digits) if digits.isdigit() else -1
