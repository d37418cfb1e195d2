"""Children of this process, and ends of any processes."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path


def ended(pid: int, seconds: float = 600.0) -> bool:
    """Whether a process has ended, or ends within `seconds`."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        return bool(poll.poll(1000 * seconds))
    finally:
        os.close(descriptor)


def children() -> set[int]:
    """Ids of this process's own children, zombies included."""
    pids: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended in between
            pids.update(map(int, (task / "children").read_text().split()))
    return pids
