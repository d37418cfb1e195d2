"""The resources of this machine or container, read once, as plain data for the checks."""

from __future__ import annotations

import math
import os
import platform
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

UNBOUNDED = 1 << 60  # cgroup v1 writes a larger number if there is no limit


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of a machine.

    Attributes:
        architecture: as `uname -m` prints it.
        cpu_flags: instruction sets of an x86 processor.
        cores: number of cores this process may use, by its affinity mask.
        cpu_quota: CPU time its control group allows, in cores; infinite without a limit.
        memory: bytes this process may use: the machine's memory, or its control group's limit if that is lower.
        memory_limited: whether `memory` is the control group's limit.
        shared_memory: free bytes of /dev/shm; None if /dev/shm is missing or not writable.
        open_files: soft limit of open files.
        environ: environment variables.
    """

    architecture: str = "x86_64"
    cpu_flags: frozenset[str] = frozenset()
    cores: int = 1
    cpu_quota: float = math.inf
    memory: int = UNBOUNDED
    memory_limited: bool = False
    shared_memory: int | None = UNBOUNDED
    open_files: int = 1 << 20
    environ: Mapping[str, str] = field(default_factory=dict)


def read_machine(root: Path = Path("/")) -> Machine:
    """The machine this process runs on. A value that cannot be read counts as unlimited.

    Args:
        root: where its /proc, /sys and /dev are.
    """
    kilobytes = _value(root / "proc/meminfo", "MemTotal").split()
    total = int(kilobytes[0]) << 10 if kilobytes else math.inf
    group = min(_control_group(root, "memory.max", "memory/memory.limit_in_bytes"), default=math.inf)
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
    limits = []
    for folder in _groups(root, ""):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            limits.append(int(quota) / int(period))
    for folder in _groups(root, "cpu"):
        quota, period = (_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit():
            limits.append(int(quota) / int(period))
    return min(limits, default=math.inf)


def _control_group(root: Path, new: str, old: str) -> Iterable[int]:
    """Limits of this process's control group and those above it, of either version."""
    controller, _, file = old.partition("/")
    paths = [folder / new for folder in _groups(root, "")]
    paths += [folder / file for folder in _groups(root, controller)]
    for path in paths:
        text = _read(path).strip()
        if text.isdigit():
            yield int(text)


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
