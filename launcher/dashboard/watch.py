"""Follows run folders for the page: reads new lines in the background and announces changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from common.errors import UserError
from launcher.folder.run import Run
from launcher.folder.run_folder import RunFolder

POLL = 1.0  # seconds between two reads of the folders
LOOK = 5.0  # seconds between two looks for new ones
HEARTBEAT = 15.0  # seconds after which pages get a message even if nothing changed


class Watch:
    """All runs of a server, followed from `start` to `stop`; run folders that `find` finds later are followed too."""

    def __init__(self, folders: Sequence[RunFolder], find: Callable[[], Sequence[RunFolder]] | None = None) -> None:
        self.runs = {folder.name: Run(folder) for folder in folders}
        self._find = find
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self.is_over = False

    async def start(self) -> None:
        """Read the metrics once, then follow all runs in the background."""
        await asyncio.gather(*(asyncio.to_thread(run.update_metrics) for run in self.runs.values()))
        for run in self.runs.values():
            self._follow_both(run)
        if self._find is not None:
            self._tasks.append(asyncio.create_task(self._look_for_runs(self._find)))

    async def stop(self) -> None:
        """Stop following, and end the streams of all pages."""
        self.is_over = True
        async with self._changed:
            self._changed.notify_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def statuses(self) -> list[dict[str, Any]]:
        return [run.status() for run in self.runs.values()]

    async def changes(self) -> AsyncIterator[list[dict[str, Any]] | None]:
        """Yield the statuses at once and after each change, and None as a heartbeat in between."""
        before: list[dict[str, Any]] = []
        while not self.is_over:
            statuses = await asyncio.to_thread(self.statuses)
            yield statuses if statuses != before else None
            before = statuses
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT), self._changed:
                    await self._changed.wait()

    def _follow_both(self, run: Run) -> None:
        updates = (run.update_metrics, run.update_episodes)
        self._tasks += [asyncio.create_task(self._follow(run, update)) for update in updates]

    async def _look_for_runs(self, find: Callable[[], Sequence[RunFolder]]) -> None:
        while True:
            await asyncio.sleep(LOOK)
            folders: Sequence[RunFolder] = ()
            with contextlib.suppress(UserError):  # all folders are gone
                folders = await asyncio.to_thread(find)
            known = {run.folder.path for run in self.runs.values()}
            for run in (Run(folder) for folder in folders if folder.path not in known and folder.name not in self.runs):
                await asyncio.to_thread(run.update_metrics)
                # A new mapping, because other threads iterate over the old one.
                self.runs = {**self.runs, run.name: run}
                self._follow_both(run)
                async with self._changed:
                    self._changed.notify_all()

    async def _follow(self, run: Run, update: Callable[[], None]) -> None:
        while True:
            before = run.status()
            reading = asyncio.create_task(asyncio.to_thread(update))
            while not reading.done():
                # Show the part of a large folder that is already read.
                await asyncio.wait([reading], timeout=POLL)
                if (status := run.status()) != before:
                    before = status
                    async with self._changed:
                        self._changed.notify_all()
            await asyncio.sleep(POLL)
