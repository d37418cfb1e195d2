"""What this machine, or the container on it, offers: read once, as plain data that checks compare with."""

from __future__ import annotations

import math
import os
import platform
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

UNBOUNDED = 1 << 60  # what cgroup v1 writes for no limit is above


@dataclass(frozen=True, slots=True)
class Machine:
    """Figures of a machine.

    Attributes:
        architecture: as `uname -m` says it.
        cpu_flags: instruction sets of an x86 processor.
        cores: this process may use, as its affinity mask says.
        cpu_quota: cores' worth of time its control group allows, infinite without a limit.
        memory: bytes this process may use, the least of the machine's and its control group's.
        memory_limited: whether that is the control group's.
        shared_memory: free bytes of /dev/shm; None where there is none that can be written.
        open_files: this process may hold; it may raise that to `open_files_hard` itself.
        environ: its environment.
    """

    architecture: str = "x86_64"
    cpu_flags: frozenset[str] = frozenset()
    cores: int = 1
    cpu_quota: float = math.inf
    memory: int = UNBOUNDED
    memory_limited: bool = False
    shared_memory: int | None = UNBOUNDED
    open_files: int = 1 << 20
    open_files_hard: int = 1 << 20
    environ: Mapping[str, str] = field(default_factory=dict)


def read_machine(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Machine:
    """The machine this process runs on. What cannot be read counts as not limited.

    Args:
        root: where its /proc, /sys and /dev are.
    """
    total = _memory_total(root)
    group = min(_control_group(root, "memory.max", "memory/memory.limit_in_bytes"), default=math.inf)
    soft, hard = (
        UNBOUNDED if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return Machine(
        architecture=platform.machine(),
        cpu_flags=_cpu_flags(root),
        cores=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(root),
        memory=int(min(total, group, UNBOUNDED)),
        memory_limited=group < total,
        shared_memory=_free(root / "dev/shm"),
        open_files=soft,
        open_files_hard=hard,
        environ=os.environ if environ is None else environ,
    )


def _cpu_flags(root: Path) -> frozenset[str]:
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _memory_total(root: Path) -> float:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    return math.inf


def _cpu_quota(root: Path) -> float:
    limits = []
    for folder in _groups(root, ""):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            limits.append(int(quota) / int(period))
    for folder in _groups(root, "cpu"):
        old, each = (_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if old.isdigit() and each.isdigit():
            limits.append(int(old) / int(each))
    return min(limits, default=math.inf)


def _control_group(root: Path, new: str, old: str) -> Iterable[int]:
    """Limits of this process's control group and those above it, of either version."""
    controller, _, file = old.partition("/")
    for path in [folder / new for folder in _groups(root, "")] + [
        folder / file for folder in _groups(root, controller)
    ]:
        text = _read(path).strip()
        if text.isdigit():
            yield int(text)


def _groups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's control group and those above it; the controller's of version 1, '' is version 2."""
    mount = root / "sys/fs/cgroup" / controller
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            parts = [part for part in path.split("/") if part and part != ".."]
            # Inside a container the path may be the host's: what is not there says nothing.
            return [mount.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return [mount]


def _free(folder: Path) -> int | None:
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
