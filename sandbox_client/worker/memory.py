"""Memory that the processes of a run use together, read from /proc; used where there is no control group."""

from __future__ import annotations

import os

INTERVAL = 0.05  # seconds between two readings; what is written and freed in between is not noticed
INODE = 1024  # bytes of kernel memory a file in a tmpfs costs, about
PAGE = os.sysconf("SC_PAGE_SIZE")


def used(pid: int, limit: int, disks: dict[str, int]) -> int:
    """Bytes of a process, its descendants and their tmpfs; shared pages count once if the sum is above the limit.

    Args:
        disks: size of each tmpfs by its path, as the first child of the process sees it.
    """
    processes = descendants(pid)
    disk = sum(tmpfs(processes[1], name, size) for name, size in disks.items()) if len(processes) > 1 else 0
    resident = sum(pages(one) for one in processes) + disk
    return resident if resident <= limit else sum(proportional(one) for one in processes) + disk


def descendants(pid: int) -> list[int]:
    """The process and all its children's children."""
    processes = [pid]
    for parent in processes:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children", "rb") as file:
                    processes += map(int, file.read().split())
        except OSError:
            continue
    return processes


def pages(pid: int) -> int:
    """Resident bytes."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def proportional(pid: int) -> int:
    """Resident bytes, each page divided by the number of processes that share it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:"))
    except (OSError, StopIteration):
        return pages(pid)


def tmpfs(pid: int, path: str, size: int) -> int:
    """Bytes and files in a tmpfs; the root it is mounted on is read-only, so no link can stand in its place.

    Before it is mounted there is a folder of the host, which has another size.
    """
    try:
        state = os.statvfs(f"/proc/{pid}/root{path}")
    except OSError:
        return 0
    if state.f_blocks * state.f_frsize != size:
        return 0
    return (state.f_blocks - state.f_bfree) * state.f_frsize + (state.f_files - state.f_ffree) * INODE
