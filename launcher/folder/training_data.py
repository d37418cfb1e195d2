"""What the learner recorded of the tokens of one episode when it trained on them (`training_data/`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.folder.episodes import record_of

FOLDER = "training_data"
MOST_BATCHES = 64  # after its dispatch, in which a sample is looked for


def training_line(folder: Path, episode: dict[str, Any]) -> dict[str, Any] | None:
    """The line of the batch that trained on an episode, with the batch's `version`; None where there is none."""
    task_id, version = episode.get("task_id"), episode.get("version")
    if not isinstance(task_id, str) or not isinstance(version, int) or episode.get("kind") != "train":
        return None
    # No batch before the task's dispatch has it.
    files = [(path.name.partition(".")[0], path) for path in (folder / FOLDER).glob("*.jsonl")]
    later = sorted((int(batch), path) for batch, path in files if batch.isdecimal() and int(batch) >= version)
    start = f'{{"task_id": {json.dumps(task_id)},'.encode()
    for batch, path in later[:MOST_BATCHES]:
        line = _line(path, start)
        if line is not None:
            return {**line, "version": batch}
    return None


def _line(path: Path, start: bytes) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            return next((record_of(line) for line in file if line.startswith(start)), None)
    except OSError:
        return None
