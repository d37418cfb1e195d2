"""A control group that limits the memory of a program's processes together, if one can be made."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

PREFIX = "spo-sandbox"
LIMITS = ("memory.max", "memory.limit_in_bytes")  # cgroup v2, v1
TCP = "memory.kmem.tcp.limit_in_bytes"  # v1, which counts TCP's buffers by themselves; v2 counts them with the rest
TCP_BYTES = 16 << 20


@dataclass
class MemoryGroup:
    """The worker's group; its files are opened before the uid is dropped, written and read after."""

    limit_fd: int
    events_fd: int
    own: int  # bytes that the worker itself may use beside the programs it runs
    limit: int = 0
    before: int = 0

    @staticmethod
    def join(folder: Path, own: int, tcp: bool = False) -> MemoryGroup:
        """Make the folder's group and enter it, and with `tcp` limit TCP's buffers too; raises `OSError`."""
        folder.mkdir(exist_ok=True)
        is_v2 = (folder / LIMITS[0]).exists()
        if tcp and not is_v2:
            (folder / TCP).write_text(str(TCP_BYTES))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        for swap in ("memory.swap.max", "memory.swappiness"):  # v2, v1
            if (folder / swap).exists():
                (folder / swap).write_text("0")
        limit, events = (LIMITS[0], "memory.events") if is_v2 else (LIMITS[1], "memory.oom_control")
        return MemoryGroup(os.open(folder / limit, os.O_WRONLY), os.open(folder / events, os.O_RDONLY), own)

    def begin(self, memory: int) -> None:
        """Set the limit of a program in bytes; the worker's own share is added."""
        if memory != self.limit:  # setting it takes the kernel milliseconds
            os.pwrite(self.limit_fd, str(memory + self.own).encode(), 0)
            self.limit = memory
        self.before = self._kills()

    def killed(self) -> bool:
        """Whether the kernel has killed a process of this program to free memory."""
        return self._kills() > self.before

    def _kills(self) -> int:
        match = re.search(rb"^oom_kill (\d+)", os.pread(self.events_fd, 4096, 0), re.MULTILINE)
        return int(match[1]) if match else 0


def find(folder: str) -> Path | None:
    """The folder to make groups in: this one, or for `auto` this process's own; None if none can be made there."""
    parent = _own_group() if folder == "auto" else Path(folder)
    if parent is None or folder == "none":
        return None
    with contextlib.suppress(OSError):
        # Only for a named folder: the kernel refuses it (EBUSY) for a group with processes, such as this one's own.
        if folder != "auto" and (parent / "cgroup.subtree_control").exists():
            (parent / "cgroup.subtree_control").write_text("+memory")
        sweep(parent)
        probe = parent / f"{PREFIX}-{os.getpid()}-probe"
        probe.mkdir()
        try:
            return parent if any((probe / name).exists() for name in LIMITS) else None
        finally:
            probe.rmdir()
    return None


def _own_group() -> Path | None:
    """The folder of this process's memory group; None if there is none."""
    groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ", 1)
        root, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        controllers = next((names for names in groups if "memory" in names.split(",")), None)
        if kind == "cgroup" and controllers is not None and "memory" in options.split(","):
            return Path(point) / os.path.relpath(groups[controllers], root)
        if kind == "cgroup2" and controllers is None and "" in groups:
            return Path(point) / os.path.relpath(groups[""], root)
    return None


def sweep(parent: Path) -> None:
    """Remove groups of processes that have ended."""
    for folder in parent.glob(f"{PREFIX}-*-*"):
        with contextlib.suppress(OSError, ValueError):
            if not os.path.exists(f"/proc/{int(folder.name.split('-')[2])}"):
                folder.rmdir()
