"""A run as its folder shows it, followed while it goes on: metrics, episodes, evaluations and configuration."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from launcher.folder.episodes import EpisodeIndex
from launcher.folder.evaluations import Evaluation, evaluations
from launcher.folder.metrics import Metrics
from launcher.folder.run_folder import RunFolder, find_runs, model_of
from launcher.folder.settings import settings
from launcher.folder.versions import recorded_versions


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """What only the run's Redis knows.

    Attributes:
        letters: reasons of the newest dead letters, and how many there are of each.
        note: why it could not be read; empty if it could.
    """

    counters: dict[str, int] = field(default_factory=dict)
    letters: Counter[str] = field(default_factory=Counter)
    note: str = ""


class Run:
    """One run; the two updates may run in a thread each.

    Attributes:
        redis: set by what asks the run's Redis; the folder is enough for all the rest.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.name = folder.name
        self.metrics = Metrics(folder.path)
        self.episodes = EpisodeIndex(folder.path)
        self.redis = RedisFacts()
        self.lock = threading.Lock()  # held while metrics change
        self.config: dict[str, Any] = {}
        self.values: dict[str, Any] = {}  # by key; paths in the run folder begin with `RUN`
        # Each has one thread that counts: of one number for both, a count would be lost now and then.
        self._metric_changes = self._episode_changes = 0
        self._files: tuple[float, ...] = ()
        self.versions: list[dict[str, Any]] = []
        self._unreadable_versions = 0

    def update_metrics(self) -> None:
        """Read new metrics, and the configuration where it or another small file has changed."""
        with self.lock:
            names = ("config.yaml", "changes.jsonl", "summary.json", "versions.jsonl")
            files = tuple(map(self._modified, names))
            if files != self._files:
                self._files, self.config = files, self.folder.config()
                self.values = settings(self.config, self.folder.path)
                self.versions, self._unreadable_versions = recorded_versions(self.folder.path)
                self._metric_changes += 1
            self._metric_changes += self.metrics.update()

    def update_episodes(self) -> None:
        """Read new episodes; those of a large folder are there little by little."""
        self._episode_changes += self.episodes.update()

    @property
    def stamp(self) -> int:
        """Grows whenever there is anything new."""
        return self._metric_changes + self._episode_changes

    @property
    def state(self) -> str:
        """`finished`, `going on`, `stopped`, or `empty`."""
        return self.folder.state(self.metrics)

    @property
    def step(self) -> int:
        """The newest version of the weights that the folder knows of."""
        steps = self.folder.final_summary(self.metrics).get("steps")
        evaluated = self.episodes.evaluated()["step"]
        trained = self.metrics.last_version("learner") or 0
        return max(trained, int(evaluated.max(initial=0)), steps if isinstance(steps, int) else 0)

    @property
    def counters(self) -> dict[str, int]:
        """The run's counters, as far as they are known."""
        return self.redis.counters or self.folder.counters(self.metrics)

    def evaluations(self) -> list[Evaluation]:
        """All complete evaluations, by version."""
        try:
            full_reward = float(self.values["sampler.tracker.reward_range"][1])
        except (KeyError, TypeError, ValueError, IndexError):
            full_reward = 1.0
        return evaluations(self.episodes, full_reward)

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the newest start, as `spo run` saw them; {} before its end."""
        seconds = self.folder.final_summary(self.metrics).get("seconds")
        known = seconds.items() if isinstance(seconds, dict) else ()
        return {str(name): float(value) for name, value in known if isinstance(value, int | float)}

    def model(self) -> str | None:
        """The model's folder or name."""
        return model_of(self.config)

    def status(self) -> dict[str, Any]:
        """The head of the page."""
        with self.lock:
            return {
                "name": self.name,
                "path": str(self.folder.path),
                "state": self.state,
                "step": self.metrics.last_version("learner") or 0,
                "steps": _whole(self.values.get("run.steps")),
                "reward": _finite(self.metrics.last("reward/mean")),
                "accuracy": _finite(self.metrics.last("validation/accuracy")),
                "episodes": len(self.episodes.rows()),
                "reading": self.episodes.is_reading,
                "notes": list(self._notes()),
                "stamp": self.stamp,
            }

    def _notes(self) -> Iterator[str]:
        """What of the folder could not be read."""
        if not self.config:
            yield "its config.yaml is missing or cannot be read"
        if self.metrics.unreadable:
            yield f"{self.metrics.unreadable:,} lines of metrics.jsonl could not be read"
        if self.episodes.unreadable:
            yield f"{self.episodes.unreadable:,} lines of episodes could not be read"
        if self._unreadable_versions:
            yield f"{self._unreadable_versions:,} lines of versions.jsonl could not be read"
        if self.redis.note:
            yield self.redis.note

    def _modified(self, name: str) -> float:
        try:
            return (self.folder.path / name).stat().st_mtime
        except OSError:
            return 0.0


def read_run(folder: RunFolder) -> Run:
    """A run as its folder is now."""
    run = Run(folder)
    run.update_metrics()
    run.update_episodes()
    return run


def read_one(path: Path) -> Run:
    """The run of a folder, or of the config.yaml in it.

    Raises:
        UserError: it is no run folder, or holds several.
    """
    folders = find_runs([path])
    if len(folders) > 1:
        raise UserError(f"{path} holds {len(folders)} runs: name one of them, such as {path / folders[0].path.name}")
    return read_run(folders[0])


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _finite(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else value
