"""What tests ask of processes and of the event loop."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path


def ended(pid: int, seconds: float = 120.0) -> bool:
    """Whether a process has ended, or does so in time."""
    return one_ended([pid], seconds)


def one_ended(pids: Iterable[int], seconds: float) -> bool:
    """Whether one of these processes has ended, or does so in time."""
    with ExitStack() as stack:
        poll = select.poll()
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return True
            stack.callback(os.close, descriptor)
            poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(1000 * max(0.0, seconds)))


def children() -> set[int]:
    """Ids of this process's own children, zombies included."""
    pids: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended in between
            pids.update(map(int, (task / "children").read_text().split()))
    return pids


class Lag:
    """How late the event loop was, at most, in seconds."""

    worst = 0.0


@asynccontextmanager
async def loop_lag() -> AsyncIterator[Lag]:
    """Measures how long anything holds the event loop up; time in which other processes had the core is not counted."""
    lag = Lag()
    core = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def now() -> tuple[float, float]:
        return time.perf_counter(), int(core.read_text().split()[1]) / 1e9

    async def beat() -> None:
        while True:
            before, waited_before = now()
            await asyncio.sleep(0.001)
            after, waited = now()
            lag.worst = max(lag.worst, after - before - 0.001 - (waited - waited_before))

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)
    try:
        yield lag
        # A last beat, so that what came just now counts.
        await asyncio.sleep(0.01)
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
