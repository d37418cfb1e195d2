"""The resources of this machine or container, read once, as plain data for the checks."""

from __future__ import annotations

import math
import os
import platform
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

UNBOUNDED = 1 << 60  # cgroup v1 writes a larger number if there is no limit


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of a machine."""

    architecture: str = "x86_64"  # as `uname -m` prints it
    cpu_flags: frozenset[str] = frozenset()  # instruction sets of an x86 processor
    cores: int = 1  # that this process may use, by its affinity mask
    cpu_quota: float = math.inf  # CPU time its control group allows, in cores; infinite without a limit
    # Bytes this process may use: the machine's memory, or its control group's limit if that is lower.
    memory: int = UNBOUNDED
    memory_limited: bool = False  # whether `memory` is the control group's limit
    shared_memory: int | None = UNBOUNDED  # free bytes of /dev/shm; None if it is missing or not writable
    open_files: int = 1 << 20  # soft limit of open files
    environ: Mapping[str, str] = field(default_factory=dict)


def read_machine(root: Path = Path("/")) -> Machine:
    """The machine whose /proc, /sys and /dev are below `root`. A value that cannot be read counts as unlimited."""
    kilobytes = _value(root / "proc/meminfo", "MemTotal").split()
    total = int(kilobytes[0]) << 10 if kilobytes else math.inf
    group = _memory_limit(root)
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Machine(
        architecture=platform.machine(),
        cpu_flags=frozenset(_value(root / "proc/cpuinfo", "flags", "Features").split()),
        cores=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(root),
        memory=int(min(total, group, UNBOUNDED)),
        memory_limited=group < total,
        shared_memory=_free(root / "dev/shm"),
        open_files=UNBOUNDED if open_files == resource.RLIM_INFINITY else open_files,
        environ=os.environ,
    )


def _value(path: Path, *names: str) -> str:
    """The value of the first line `name: value` with one of these names; empty if there is none."""
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value
    return ""


def _cpu_quota(root: Path) -> float:
    pairs = [_read(folder / "cpu.max").strip().partition(" ")[::2] for folder in _groups(root, "")]
    pairs += [
        (_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip())
        for folder in _groups(root, "cpu")
    ]
    limits = (int(quota) / int(period) for quota, period in pairs if quota.isdigit() and period.isdigit())
    return min(limits, default=math.inf)


def _memory_limit(root: Path) -> float:
    paths = [folder / "memory.max" for folder in _groups(root, "")]
    paths += [folder / "memory.limit_in_bytes" for folder in _groups(root, "memory")]
    return min((int(text) for path in paths if (text := _read(path).strip()).isdigit()), default=math.inf)


def _groups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's control group and its parents, of a version 1 controller; if empty, of version 2."""
    mount = root / "sys/fs/cgroup" / controller
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            parts = [part for part in path.split("/") if part and part != ".."]
            # In a container the path may be the host's, and not exist here.
            return [mount.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return [mount]


def _free(folder: Path) -> int | None:
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def parse_count(text: str) -> int | None:
    """A whole number of 0 or more, or None."""
    return int(text) if text.isascii() and text.isdecimal() else None


def format_bytes(size: float) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
