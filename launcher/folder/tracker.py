"""The value tracker that a run folder has with a checkpoint."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.files import tracker_path


class SavedTracker(NamedTuple):
    """The tracker at a checkpoint's version; arrays [N], one entry for each prompt."""

    version: int
    prompt_ids: list[str]
    values: np.ndarray  # estimated reward, from 0 to 1 (lowest to highest reward)
    counts: np.ndarray  # alpha + beta, which says how much is known about each value
    visits: np.ndarray  # how often each prompt was drawn


def newest_tracker(folder: Path) -> SavedTracker | None:
    """The tracker saved with the newest readable checkpoint; None if there is none."""
    files = [path for path in tracker_path(folder, 0).parent.glob("step_*.npz") if path.stem[5:].isdecimal()]
    for path in sorted(files, key=lambda path: -int(path.stem[5:])):
        try:
            with np.load(path) as arrays:
                ids, visits, alpha, beta = (arrays[name] for name in ("prompt_ids", "visits", "alpha", "beta"))
        except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
            continue
        names = [name.decode(errors="replace") for name in ids]
        counts = alpha + beta
        return SavedTracker(int(path.stem[5:]), names, alpha / np.maximum(counts, 1e-12), counts, visits)
    return None
