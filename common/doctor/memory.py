"""Shared memory and memory, against what a model of this size needs."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

from common.config import Config
from common.doctor.case import Case, mib
from common.doctor.finding import Finding, ok, problem, warning
from common.doctor.gpu import cpu_build
from common.doctor.model import Size, size_of
from common.role import Role

# vLLM 0.32 refuses to make its queues to and from workers where less is free: 160 MiB and 240 MiB.
VLLM_QUEUES = 256 << 20
# DeepSpeed's reduction on the CPU fills 66 MiB a rank; NCCL takes 9 MiB for each connection of each channel.
LEARNER_RANK = 72 << 20
ADVISED = 1 << 30  # by NVIDIA, for NCCL between GPUs
PROCESS = 3 << 29  # torch, vLLM or DeepSpeed with nothing loaded
KV_CACHE = 1 << 30  # our default on a CPU
FIX = "start the container with --shm-size=1g (compose.yaml: shm_size) or --ipc=host"


def shared_memory(case: Case) -> Finding | None:
    """Whether /dev/shm has room for what several ranks of a model exchange there."""
    if case.role not in (Role.GENERATOR, Role.LEARNER):
        return None
    name, free, ranks = "shared memory", case.machine.shared_memory, case.ranks()
    if free is None:
        return problem(name, f"/dev/shm is not there or cannot be written, and processes of one model share it: {FIX}")
    shown = f"{mib(free)} free in /dev/shm" if free < 1 << 50 else "/dev/shm is not limited"
    if ranks == 1:
        return ok(name, shown)
    needed = VLLM_QUEUES if case.role is Role.GENERATOR else ranks * LEARNER_RANK
    if free < needed:
        return problem(name, f"{shown}, and {ranks} ranks need {mib(needed)} at least: {FIX}")
    if free < ADVISED and cpu_build(case.role) is None:
        return warning(name, f"{shown}; NVIDIA advises 1 GiB for {ranks} ranks: {FIX}")
    return ok(name, f"{shown}, for {ranks} ranks")


def memory(case: Case, config: Config) -> Finding | None:
    """Whether the machine's memory, or the container's, holds the model; an estimate, so at most a warning."""
    size = size_of(Path(config.model.path)) if case.role in (Role.GENERATOR, Role.LEARNER) else None
    if size is None:
        return None
    needed, machine, name = estimate(case, config, size), case.machine, "memory"
    whose = "the container's limit" if machine.memory_limited else "this machine"
    if needed > machine.memory:
        return warning(
            name,
            f"about {mib(needed)} are needed for {size.parameters:,} parameters, and {whose} has "
            f"{mib(machine.memory)}: the kernel would kill the process; raise the limit, or use a smaller model",
        )
    return ok(name, f"about {mib(needed)} of {mib(machine.memory)} are needed")


def estimate(case: Case, config: Config, size: Size) -> float:
    """Bytes of host memory a process needs, roughly.

    Both hold the weights once more for their transfer. Computing on the CPU, a generator has its KV cache there; the
    learner has weights and gradients in its own type, and three float32 copies of AdamW's, which ranks share.
    """
    sent = size.parameters * (4 if config.model.dtype == "float32" else 2)
    base = PROCESS * case.ranks() + sent
    if cpu_build(case.role) is None:
        return base
    if case.role is Role.GENERATOR:
        cache = config.generator.engine.get("kv_cache_memory_bytes", KV_CACHE)
        space = case.machine.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
        # What is no number vLLM refuses itself.
        with contextlib.suppress(ValueError):
            cache = float(space) * (1 << 30) if space else cache
        return base + sent + (cache if isinstance(cache, int | float) and math.isfinite(cache) else KV_CACHE)
    computed = 4 if config.learner.dtype == "float32" else 2
    return base + size.parameters * (2 * computed + 12)
