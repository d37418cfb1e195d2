"""Tracker and books on disk beside each of the learner's checkpoints, for a run whose Redis is gone."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.files import sync_folder
from sampler.state import SamplerState


def save(path: Path, state: SamplerState, keep: int, books: bytes = b"") -> None:
    """Write the file whole or not at all, and remove all but the `keep` newest of its folder.

    Args:
        books: of `pack_books`.

    Raises:
        UserError: the file cannot be written.
    """
    unfinished = path.with_suffix(".part")
    arrays: Any = state.tracker.state_dict() | {"answered": state.drift.answered, "moved": state.drift.by_version()}
    arrays["books"] = np.frombuffer(books, np.uint8)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync_folder(path.parent)
        for old in sorted(path.parent.glob("step_*.npz"), key=_version)[:-keep]:
            old.unlink(missing_ok=True)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"tracker checkpoint {path} cannot be written: {error.strerror}") from None


def load(path: Path, state: SamplerState) -> bytes | None:
    """Restore tracker and drift from a file; returns its books, b"" if it has none, or None if there is no file.

    Raises:
        UserError: the file cannot be read.
    """
    if not path.is_file():
        return None
    try:
        with np.load(path) as arrays:
            state.tracker.load_state_dict(arrays)
            state.drift.restore(arrays["moved"])
            for prompt_id, answered in zip(arrays["prompt_ids"].tolist(), arrays["answered"].tolist(), strict=True):
                i = state.tracker.index.get(prompt_id.decode())
                if i is not None:
                    state.drift.answered[i] = answered
            return arrays["books"].tobytes() if "books" in arrays else b""
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"tracker checkpoint {path} cannot be read: {error}; remove it to start without") from None


def _version(path: Path) -> int:
    digits = path.stem.rpartition("_")[2]
    return int(digits) if digits.isdigit() else -1
