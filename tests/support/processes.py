"""Children of this process, and ends of any processes."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path


def ended(pid: int, seconds: float = 600.0) -> bool:
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
