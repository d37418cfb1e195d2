"""A run as its folder shows it, live or afterwards: metrics, episodes, evaluations and configuration."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError, one_line
from launcher.folder.episodes import EpisodeIndex
from launcher.folder.evaluations import Evaluation, evaluations
from launcher.folder.metrics import Metrics
from launcher.folder.run_folder import RunFolder, find_runs, is_locked, model_of
from launcher.folder.settings import setting, settings
from launcher.folder.time_budget import seconds_left, total_seconds

MOST_CHANGES = 200  # that are marked on curves
RECENT = 90.0  # seconds without an entry after which a run counts as stopped


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """Facts that only the run's Redis knows."""

    counters: dict[str, int] = field(default_factory=dict)
    letters: Counter[str] = field(default_factory=Counter)  # reasons of the newest dead letters, with their counts
    note: str = ""  # why Redis could not be read; empty if it could


class Run:
    """One run; each of the two updates may run in a thread of its own."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.name = folder.name
        self.metrics = Metrics(folder.path)
        self.episodes = EpisodeIndex(folder.path)
        self.redis = RedisFacts()  # a caller that has asked Redis sets it; all the rest comes from the folder
        self.lock = threading.Lock()  # held while metrics change
        self.config: dict[str, Any] = {}
        self.values: dict[str, Any] = {}  # by key; paths in the run folder begin with `RUN`
        # One counter per thread: two threads that increment one number would lose counts.
        self._metric_changes = self._episode_changes = 0
        self._files: tuple[float, ...] = ()
        self.versions: list[dict[str, Any]] = []
        self.changes: list[dict[str, Any]] = []
        self._unreadable_versions = 0

    def update_metrics(self) -> None:
        """Read new metrics, and the configuration if it or another small file has changed."""
        with self.lock:
            names = ("config.yaml", "changes.jsonl", "summary.json", "versions.jsonl")
            files = tuple(map(self._modified, names))
            if files != self._files:
                self._files, self.config = files, self.folder.config()
                self.values = settings(self.config, self.folder.path)
                self.versions, self._unreadable_versions = self.folder.versions()
                self.changes = self.folder.changes()
                self._metric_changes += 1
            self._metric_changes += self.metrics.update()

    def update_episodes(self) -> None:
        """Read new episodes; those of a large folder appear in batches."""
        self._episode_changes += self.episodes.update()

    @property
    def stamp(self) -> int:
        """A number that grows with every change."""
        return self._metric_changes + self._episode_changes

    @property
    def state(self) -> str:
        """`finished`, `running`, `stopped`, or `empty` if nothing has been written yet."""
        summary, steps = self._summary(), self.steps
        if summary:
            # A finished run that was given more steps is unfinished again.
            made = _whole(summary.get("steps"))
            has_all = steps is None or made is None or made >= steps or bool(summary.get("ended_early"))
            return "finished" if summary.get("finished") and has_all else "stopped"
        newest = self.metrics.last_time()
        if is_locked(self.folder.path) or newest > time.time() - RECENT:
            return "running"
        return "stopped" if newest else "empty"

    @property
    def steps(self) -> int | None:
        """The configured number of steps; None if the configuration cannot be read."""
        return _whole(self.values.get("run.steps"))

    @property
    def step(self) -> int:
        """The newest weight version that the folder mentions."""
        evaluated = self.episodes.evaluated()["step"]
        trained = self.metrics.last_version("learner") or 0
        return max(trained, int(evaluated.max(initial=0)), _whole(self._summary().get("steps")) or 0)

    @property
    def counters(self) -> dict[str, int]:
        """The run's counters: from Redis if it was asked, else from the metrics and the summary."""
        if self.redis.counters:
            return self.redis.counters
        counters = {
            name.removeprefix("samples/"): int(value)
            for name in self.metrics.names("sampler")
            if name.startswith("samples/") and not name.endswith("per_second")
            and (value := self.metrics.last(name, "sampler")) is not None and value == value
        }  # fmt: skip
        final = self.folder.summary().get("counters")
        for name, value in final.items() if isinstance(final, dict) else ():
            if isinstance(value, int):
                counters[name] = max(value, counters.get(name, 0))
        return counters

    def evaluations(self) -> list[Evaluation]:
        try:
            given = self.values.get("eval.right_from")
            right_from = float(self.values["sampler.tracker.reward_range"][1] if given is None else given)
        except (KeyError, TypeError, ValueError, IndexError):
            right_from = 1.0
        return evaluations(self.episodes, right_from)

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the newest start, as `spo run` measured them; {} before its end."""
        seconds = self._summary().get("seconds")
        items = seconds.items() if isinstance(seconds, dict) else ()
        return {str(name): float(value) for name, value in items if isinstance(value, int | float)}

    def model(self) -> str | None:
        return model_of(self.config)

    @property
    def ended_with(self) -> str:
        """The error, or the early stop, with which the newest start ended before its end; "" without one."""
        summary = self._summary()
        return str(summary.get("error") or summary.get("ended_early") or "")

    def status(self) -> dict[str, Any]:
        with self.lock:
            state = self.state
            return {
                "name": self.name,
                "path": str(self.folder.path),
                "state": state,
                "ended_with": one_line(self.ended_with),
                "step": self.metrics.last_version("learner") or 0,
                "steps": self.steps,
                "seconds": round(total_seconds(self.metrics, self.phases())),
                "left": seconds_left(self.metrics, self.steps or 0) if state == "running" else None,
                "changes": [
                    {
                        "step": change["step"],
                        "words": one_line(
                            f"{change['key']}: {setting(change.get('from'))} → {setting(change.get('to'))}"
                        ),
                    }
                    for change in self.changes[:MOST_CHANGES]
                    if isinstance(change.get("step"), int)
                ],
                "reward": _finite(self.metrics.last("reward/mean")),
                "accuracy": _finite(self.metrics.last("validation/accuracy")),
                "episodes": len(self.episodes.rows()),
                "reading": self.episodes.is_reading,
                "notes": list(self._notes()),
                "stamp": self.stamp,
            }

    def _summary(self) -> dict[str, Any]:
        """The summary; {} if the run has continued since it was written."""
        summary = self.folder.summary()
        is_newest = self._modified("summary.json") >= self.metrics.last_time() - 1.0
        steps, trained = summary.get("steps"), self.metrics.last_version("learner") or 0
        return summary if is_newest and not (isinstance(steps, int) and trained > steps) else {}

    def _notes(self) -> Iterator[str]:
        """Sentences about files that could not be read."""
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
    run = Run(folder)
    run.update_metrics()
    run.update_episodes()
    return run


def read_one(path: Path) -> Run:
    """The run in a folder, which may be named by its config.yaml; raises `UserError` if it has none or several."""
    folders = find_runs([path])
    if len(folders) > 1:
        raise UserError(f"{path} holds {len(folders)} runs: name one of them, such as {path / folders[0].path.name}")
    return read_run(folders[0])


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _finite(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else value
