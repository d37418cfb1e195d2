"""Limits of a process: threads and open files."""

from __future__ import annotations

from common.preflight.context import Context, parse_count
from common.preflight.finding import Finding, ok, warning
from common.process import Role

OPEN_FILES = 1024
OPEN_FILES_SANDBOX = 2048


def threads(context: Context) -> Finding | None:
    """Whether the processes that compute start no more threads than they have cores."""
    if context.role not in (Role.GENERATOR, Role.LEARNER):
        return None
    machine, name = context.machine, "threads"
    cores = min(float(machine.cores), machine.cpu_quota)
    setting = machine.environ.get("OMP_NUM_THREADS")
    count = parse_count(setting) if setting is not None else None
    if count is not None and count > cores:
        return warning(
            name, f"OMP_NUM_THREADS = {count} on {cores:g} cores: more threads than cores are slow; set it to {cores:g}"
        )
    if setting is None and machine.cores > machine.cpu_quota:
        return warning(
            name,
            f"this process sees {machine.cores} cores and may use the time of {machine.cpu_quota:g}: set "
            f"OMP_NUM_THREADS={max(1, int(cores))}, or libraries start a thread for each core",
        )
    return ok(name, f"{cores:g} cores, OMP_NUM_THREADS = {setting or 'not set'}")


def open_files(context: Context) -> Finding:
    """Whether the process may open enough files and connections."""
    needed = OPEN_FILES_SANDBOX if context.role is Role.SANDBOX else OPEN_FILES
    if context.role is Role.GENERATOR and context.config is not None:
        needed = max(needed, 512 + 4 * context.config.generator.max_concurrency)
    limit = context.machine.open_files
    if limit < needed:
        return warning(
            "open files", f"ulimit -n is {limit}, and {needed} are needed: raise it (docker: ulimits, nofile)"
        )
    return ok("open files", "no limit" if limit > 1 << 40 else str(limit))
