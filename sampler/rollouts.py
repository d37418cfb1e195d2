"""Training episodes that are kept for people to read: all of chosen versions, and every task set aside."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from common.messages import SampleHeader
from sampler.episode_files import EpisodeFiles, episode_line
from sampler.records import DispatchedTask


class Rollouts:
    """Collects a round's episodes and writes them at once.

    Args:
        folder: for `<version>.jsonl`, by the version at dispatch.
        every: versions that are a multiple of it are chosen; 0: nothing is kept.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self._files = EpisodeFiles(folder)
        self._every = every
        self._round: dict[int, list[tuple[str, bytes]]] = defaultdict(list)

    def is_chosen(self, version: int) -> bool:
        """Whether episodes dispatched at a version are kept."""
        return self._every > 0 and version % self._every == 0

    def wants(self, task: DispatchedTask, header: SampleHeader) -> bool:
        """Whether to keep this episode."""
        return self.is_chosen(task.version) or (self._every > 0 and header.status == "set_aside")

    def add(self, task: DispatchedTask, header: SampleHeader, prompt: dict[str, Any]) -> None:
        """Keep an episode; `prompt` stands in for a record that is not there."""
        about = {"prompt_id": task.prompt_id, "version": task.version, "value": round(task.value, 6)}
        self._round[task.version].append((header.task_id, episode_line(header, about, prompt)))

    def write(self) -> None:
        """Write what was added; raises `UserError` where the files cannot be written."""
        for version, lines in self._round.items():
            self._files.write(version, lines)
        self._round.clear()

    def discard(self, version: int) -> None:
        """Remove what another run in this folder left of this version and of later ones."""
        if self._every > 0:
            self._files.discard(version)
