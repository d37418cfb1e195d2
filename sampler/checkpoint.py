"""The tracker on disk beside each of the learner's checkpoints, for a run whose Redis is gone."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from sampler.state import SamplerState


def path_of(folder: Path, version: int) -> Path:
    """File of a version in the run folder; the learner's own checkpoints are beside it."""
    return folder / "checkpoints" / "tracker" / f"step_{version}.npz"


def save(path: Path, state: SamplerState, keep: int) -> None:
    """Write the file whole or not at all, and remove all but the `keep` newest of its folder.

    Raises:
        UserError: the file cannot be written.
    """
    unfinished = path.with_suffix(".part")
    arrays: Any = state.tracker.state_dict() | {"answered": state.drift.answered, "moved": state.drift.by_version()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise UserError(f"tracker checkpoint {path} cannot be written: {error.strerror}") from None
    for old in sorted(path.parent.glob("step_*.npz"), key=_version)[:-keep]:
        old.unlink(missing_ok=True)


def load(path: Path, state: SamplerState) -> bool:
    """Restore tracker and drift from a file; False if there is none.

    Raises:
        UserError: the file cannot be read.
    """
    if not path.is_file():
        return False
    try:
        with np.load(path) as arrays:
            state.tracker.load_state_dict(arrays)
            state.drift.restore(arrays["moved"])
            for prompt_id, answered in zip(arrays["prompt_ids"].tolist(), arrays["answered"].tolist(), strict=True):
                i = state.tracker.index.get(prompt_id.decode())
                if i is not None:
                    state.drift.answered[i] = answered
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"tracker checkpoint {path} cannot be read: {error}; remove it to start without") from None
    return True


def _version(path: Path) -> int:
    digits = path.stem.rpartition("_")[2]
    return int(digits) if digits.isdigit() else -1
