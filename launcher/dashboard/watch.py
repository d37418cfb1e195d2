"""Follows run folders for the page: reads what is new in the background, and says when there is something."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from launcher.dashboard.charts import Chart
from launcher.dashboard.panels.answers import endings_panel, lengths_panel
from launcher.dashboard.panels.configuration import configuration_panel
from launcher.dashboard.panels.health import processes_panel, queues_panel
from launcher.dashboard.panels.reward import reward_panel
from launcher.dashboard.panels.staleness import correction_panel, optimization_panel, staleness_panel
from launcher.dashboard.panels.throughput import throughput_panel
from launcher.dashboard.panels.tracker import tracker_panel
from launcher.folder.episodes import EpisodeIndex
from launcher.folder.metrics import Metrics
from launcher.folder.run_folder import RunFolder
from launcher.folder.version_table import recorded_versions

POLL = 1.0  # seconds between two looks at the folders
HEARTBEAT = 15.0  # seconds after which a page hears something, whatever happens


class WatchedRun:
    """One run: its metrics, its episodes, and a number that changes with them."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.metrics = Metrics(folder.path)
        self.episodes = EpisodeIndex(folder.path)
        # Each has one thread that counts: of one number for both, a count would be lost now and then.
        self._metric_changes = self._episode_changes = 0
        self._lock = threading.Lock()
        self._files: tuple[float, ...] = ()
        self._steps: int | None = None

    def update_metrics(self) -> None:
        """Read new metrics; look whether the configuration or the summary have changed."""
        with self._lock:
            files = tuple(self._modified(name) for name in ("config.yaml", "changes.jsonl", "summary.json"))
            if files != self._files:
                self._files, self._steps = files, self.folder.steps()
                self._metric_changes += 1
            self._metric_changes += self.metrics.update()

    def update_episodes(self) -> None:
        """Read new episodes; those of a large folder are there little by little."""
        self._episode_changes += self.episodes.update()

    @property
    def stamp(self) -> int:
        """Grows whenever there is anything new."""
        return self._metric_changes + self._episode_changes

    def status(self) -> dict[str, Any]:
        """What the page's head shows."""
        with self._lock:
            return {
                "name": self.folder.name,
                "path": str(self.folder.path),
                "state": self.folder.state(self.metrics),
                "step": self.metrics.last_version("learner") or 0,
                "steps": self._steps,
                "reward": _known(self.metrics.last("reward/mean")),
                "accuracy": _known(self.metrics.last("validation/accuracy")),
                "episodes": len(self.episodes.rows()),
                "reading": self.episodes.is_reading,
                "notes": self._notes(),
                "stamp": self.stamp,
            }

    def panels(self) -> list[Chart]:
        """Everything but the episode browser."""
        with self._lock:
            metrics, index, start = self.metrics, self.episodes, self._start()
            now = time.time() if self.folder.state(metrics) == "going on" else None
            return [
                reward_panel(metrics),
                throughput_panel(metrics, start),
                staleness_panel(metrics),
                tracker_panel(metrics, self.folder.path),
                correction_panel(metrics),
                optimization_panel(metrics),
                lengths_panel(metrics, index),
                endings_panel(metrics, index),
                queues_panel(metrics, start),
                processes_panel(metrics, self.folder.books(metrics), start, now),
                configuration_panel(
                    self.folder.config(), self.folder.changes(), recorded_versions(self.folder.path)[0]
                ),
            ]

    def _start(self) -> float:
        """When the run began: the first entry of any process."""
        times = [
            self.metrics.timeline(names[0], process).times[0]
            for process in self.metrics.processes()
            if (names := self.metrics.names(process))
        ]
        return float(min(times, default=0.0))

    def _notes(self) -> list[str]:
        """What of the folder could not be read."""
        metrics, episodes = self.metrics.unreadable, self.episodes.unreadable
        return [
            *([self.metrics.note] if self.metrics.note else []),
            *([f"{metrics:,} lines of metrics.jsonl could not be read"] if metrics else []),
            *([f"{episodes:,} lines of episodes could not be read"] if episodes else []),
        ]

    def _modified(self, name: str) -> float:
        try:
            return (self.folder.path / name).stat().st_mtime
        except OSError:
            return 0.0


class Watch:
    """All runs of a server; `start` has them followed until `stop`."""

    def __init__(self, folders: Sequence[RunFolder]) -> None:
        self.runs = {folder.name: WatchedRun(folder) for folder in folders}
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self.is_over = False

    async def start(self) -> None:
        """Read the metrics once, then follow all in the background."""
        await asyncio.gather(*(asyncio.to_thread(run.update_metrics) for run in self.runs.values()))
        for run in self.runs.values():
            self._tasks += [asyncio.create_task(self._follow(run, update))
                            for update in (run.update_metrics, run.update_episodes)]  # fmt: skip

    async def stop(self) -> None:
        """End the following, and the streams of all pages."""
        self.is_over = True
        async with self._changed:
            self._changed.notify_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def statuses(self) -> list[dict[str, Any]]:
        """The status of each run."""
        return [run.status() for run in self.runs.values()]

    async def changes(self) -> AsyncIterator[list[dict[str, Any]] | None]:
        """The statuses now and whenever one has changed; None now and then in between."""
        before: list[dict[str, Any]] = []
        while not self.is_over:
            statuses = await asyncio.to_thread(self.statuses)
            yield statuses if statuses != before else None
            before = statuses
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT), self._changed:
                    await self._changed.wait()

    async def _follow(self, run: WatchedRun, update: Any) -> None:
        while True:
            before = run.status()
            reading = asyncio.create_task(asyncio.to_thread(update))
            while not reading.done():
                # Of a large folder what is there already is shown meanwhile.
                await asyncio.wait([reading], timeout=POLL)
                if (status := run.status()) != before:
                    before = status
                    async with self._changed:
                        self._changed.notify_all()
            await asyncio.sleep(POLL)


def _known(value: float | None) -> float | None:
    return None if value is None or value != value else value
