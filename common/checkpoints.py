"""Where a run's checkpoints lie: the learner writes them, and other commands look for them."""

from __future__ import annotations

from pathlib import Path

METADATA = "checkpoint.json"  # written last: what has it is whole
STEP = "step_"


def checkpoints(run_folder: Path) -> Path:
    """Folder of all checkpoints of a run."""
    return run_folder / "checkpoints"


def checkpoint(run_folder: Path, version: int) -> Path:
    """Folder of one checkpoint."""
    return checkpoints(run_folder) / f"{STEP}{version}"


def versions(run_folder: Path) -> list[int]:
    """Versions of the complete checkpoints, ascending."""
    names = (path.parent.name.removeprefix(STEP) for path in checkpoints(run_folder).glob(f"{STEP}*/{METADATA}"))
    return sorted(int(name) for name in names if name.isdigit())
