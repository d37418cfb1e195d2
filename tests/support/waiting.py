"""Waiting for a change that no event announces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE = 600.0  # seconds until a test gives up; nothing waits that long


def eventually(holds: Callable[[], object]) -> None:
    """Wait for other threads and processes."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


async def until(holds: Callable[[], object]) -> None:
    """Wait for other tasks, threads and processes while the event loop runs."""
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.002)
