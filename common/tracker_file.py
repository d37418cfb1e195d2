"""Where the sampler's state lies beside the learner's checkpoints: the sampler writes it, the learner looks for it."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path


def path_of(run_folder: Path, version: int) -> Path:
    """File of a version in the run folder."""
    return run_folder / "checkpoints" / "tracker" / f"step_{version}.npz"


def is_whole(path: Path) -> bool:
    """Whether the file is there, and its contents agree with their checksums."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (OSError, ValueError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile):
        return False
