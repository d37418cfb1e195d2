"""Limits of a program: resource limits and, without a control group, the memory that its processes use together."""

from __future__ import annotations

import math
import os
import resource

from common.keeper import descendants
from sandbox_client.worker.protocol import ProgramLimits
from sandbox_client.worker.request import Program

LOCKED = 1 << 16  # bytes that may be locked into memory
SIGNALS = 1024  # that may be queued
INTERVAL = 0.05  # seconds between two readings of memory; what is written and freed in between is not noticed
INODE = 1024  # bytes of kernel memory a file in a tmpfs costs, about
SOCKET = 2 * 212992  # bytes that a Unix socket holds at most (net.core.wmem_default, and as much for its last message)


def apply(pid: int, limits: ProgramLimits, program: Program) -> None:
    """Limit a process, and so all that it will start; no limit is raised.

    It is the first process of its user namespace: since Linux 5.14 processes are counted per namespace, and the user's
    processes outside count only against limits that were set before.

    Raises:
        OSError: that is not allowed, or the process is gone.
    """
    seconds = math.ceil(program.seconds)
    hard_limits = {
        resource.RLIMIT_CPU: seconds + 1,
        resource.RLIMIT_AS: program.memory,
        resource.RLIMIT_FSIZE: limits.file_mb << 20,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_NPROC: limits.processes,
        resource.RLIMIT_MEMLOCK: LOCKED,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: SIGNALS,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_CORE: 1,  # not 0: at 0 a core still goes to the host's handler, at 1 nowhere (core(5))
    }
    for kind, hard in hard_limits.items():
        current = resource.prlimit(pid, kind)[1]
        if current != resource.RLIM_INFINITY:
            hard = min(hard, current)
        soft = min(seconds, hard) if kind == resource.RLIMIT_CPU else hard
        resource.prlimit(pid, kind, (soft, hard))


def memory_used(pid: int, limit: int, disks: dict[str, int]) -> int:
    """Bytes that a process, its descendants, their tmpfs and sockets use.

    If the sum is above the limit, pages that processes share count only once.

    Args:
        disks: size of each tmpfs by its path, as the first child of the process sees it; empty for a bare program.
    """
    processes = descendants(pid)
    kernel = 0
    if disks and len(processes) > 1:
        kernel = sum(tmpfs_used(processes[1], path, size) for path, size in disks.items())
        kernel += unix_sockets(processes[1]) * SOCKET
    resident = sum(map(_resident, processes)) + kernel
    return resident if resident <= limit else sum(map(_proportional, processes)) + kernel


def _resident(pid: int) -> int:
    """Resident and swapped bytes, and page tables."""
    return _lines(f"/proc/{pid}/status", b"VmRSS:", b"VmSwap:", b"VmPTE:")


def _proportional(pid: int) -> int:
    """The same, but each page divided by the number of processes that share it."""
    pages = _lines(f"/proc/{pid}/smaps_rollup", b"Pss:", b"SwapPss:")
    return pages + _lines(f"/proc/{pid}/status", b"VmPTE:") if pages else _resident(pid)


def _lines(path: str, *names: bytes) -> int:
    """The sum of these lines in bytes; 0 if there are none, or the process is gone or hides them."""
    try:
        with open(path, "rb") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(names))
    except OSError:
        return 0


def unix_sockets(pid: int) -> int:
    """Number of Unix sockets in a process's network namespace, including closed ones with unread messages."""
    try:
        with open(f"/proc/{pid}/net/protocols", "rb") as file:
            return sum(int(line.split()[2]) for line in file if line.startswith(b"UNIX"))
    except OSError:
        return 0


def tmpfs_used(pid: int, path: str, size: int) -> int:
    """Bytes used by a tmpfs and its files; the root it is mounted on is read-only, so no link can replace it.

    Before the mount its path is a folder of the host, which has another size.
    """
    try:
        state = os.statvfs(f"/proc/{pid}/root{path}")
    except OSError:
        return 0
    if state.f_blocks * state.f_frsize != size:
        return 0
    return (state.f_blocks - state.f_bfree) * state.f_frsize + (state.f_files - state.f_ffree) * INODE
