"""What is read of a machine: processors, limits of control groups, shared memory."""

from __future__ import annotations

import math
from pathlib import Path

from common.preflight.machine import UNBOUNDED, read_machine


def put(root: Path, **files: str) -> Path:
    """Files below a root; `__` in a name stands for a slash, and a leading one is left out."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_instruction_sets_are_those_of_the_first_processor(tmp_path: Path) -> None:
    put(tmp_path, proc__cpuinfo="processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: other\n")
    assert read_machine(tmp_path).cpu_flags == {"fpu", "avx2"}


def test_the_least_memory_limit_of_all_control_groups_above_counts(tmp_path: Path) -> None:
    put(tmp_path, proc__meminfo="MemTotal:       1000 kB\n", proc__self__cgroup="0::/a/b\n")
    assert read_machine(tmp_path).memory == 1000 << 10
    assert not read_machine(tmp_path).memory_limited
    group = tmp_path / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("4096\n")
    machine = read_machine(tmp_path)
    assert (machine.memory, machine.memory_limited) == (4096, True)


def test_a_container_sees_its_limit_at_the_root_of_its_own_hierarchy(tmp_path: Path) -> None:
    put(tmp_path, proc__self__cgroup="0::/\n")
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("8192\n")
    (folder / "cpu.max").write_text("150000 100000\n")
    machine = read_machine(tmp_path)
    assert (machine.memory, machine.cpu_quota) == (8192, 1.5)


def test_limits_of_control_groups_version_1_are_found(tmp_path: Path) -> None:
    put(tmp_path, proc__self__cgroup="4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n")
    for name, text in (("memory/memory.limit_in_bytes", "4096"), ("cpu/cpu.cfs_quota_us", "50000")):
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us").write_text("100000")
    machine = read_machine(tmp_path)
    assert (machine.memory, machine.cpu_quota) == (4096, 0.5)


def test_what_cannot_be_read_is_no_limit(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert (machine.cpu_flags, machine.memory, machine.cpu_quota) == (frozenset(), UNBOUNDED, math.inf)
    assert machine.shared_memory is None


def test_shared_memory_is_what_is_free_there(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert read_machine(tmp_path).shared_memory > 0
