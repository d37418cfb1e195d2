"""Follows run folders for the page: reads new lines in the background and announces changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from launcher.folder.run import Run
from launcher.folder.run_folder import RunFolder

POLL = 1.0  # seconds between two reads of the folders
HEARTBEAT = 15.0  # seconds after which pages get a message even if nothing changed


class Watch:
    """All runs of a server, followed from `start` to `stop`."""

    def __init__(self, folders: Sequence[RunFolder]) -> None:
        self.runs = {folder.name: Run(folder) for folder in folders}
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self.is_over = False

    async def start(self) -> None:
        """Read the metrics once, then follow all runs in the background."""
        await asyncio.gather(*(asyncio.to_thread(run.update_metrics) for run in self.runs.values()))
        for run in self.runs.values():
            self._tasks += [asyncio.create_task(self._follow(run, update))
                            for update in (run.update_metrics, run.update_episodes)]  # fmt: skip

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
