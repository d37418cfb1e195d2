"""Shared memory, through which the ranks of a model exchange data."""

from __future__ import annotations

from common.preflight.context import Context, format_bytes
from common.preflight.finding import Finding, ok, problem, warning
from common.preflight.gpu import cpu_build
from common.process import Role

# vLLM 0.32 refuses to create its queues to and from workers with less free space: they take 160 MiB and 240 MiB.
VLLM_QUEUES = 256 << 20
# DeepSpeed's reduction on the CPU takes 66 MiB a rank; NCCL takes 9 MiB for each connection of each channel.
LEARNER_RANK = 72 << 20
NCCL_ADVISED = 1 << 30  # NVIDIA's advice for NCCL between GPUs
FIX = "start the container with --shm-size=1g (compose.yaml: shm_size) or --ipc=host"


def shared_memory(context: Context) -> Finding | None:
    """Whether /dev/shm has room for the ranks of a model on this machine."""
    if context.role not in (Role.GENERATOR, Role.LEARNER):
        return None
    name, free, ranks = "shared memory", context.machine.shared_memory, context.ranks()
    if free is None:
        return problem(name, f"/dev/shm is missing or not writable, and the ranks of a model need it: {FIX}")
    line = f"{format_bytes(free)} free in /dev/shm" if free < 1 << 50 else "/dev/shm is not limited"
    if ranks == 1:
        return ok(name, line)
    needed = VLLM_QUEUES if context.role is Role.GENERATOR else ranks * LEARNER_RANK
    if free < needed:
        return problem(name, f"{line}, and {ranks} ranks need {format_bytes(needed)} at least: {FIX}")
    if free < NCCL_ADVISED and cpu_build(context.role) is None:
        return warning(name, f"{line}; NVIDIA advises 1 GiB for {ranks} ranks: {FIX}")
    return ok(name, f"{line}, for {ranks} ranks")
