"""The checks of processor and GPUs: which kernels and devices vLLM and torch would find."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.checks import computing
from common.checks.check import Context
from common.checks.computing import Gpus, compare, kernels_for, why_no_gpu
from common.checks.machine import Machine
from common.process import Role
from tests.support.checks import AVX512, CUDA_BUILDS, config_of

GENERATOR, LEARNER = Role.GENERATOR, Role.LEARNER
OK, WARNING, PROBLEM = "ok", "warning", "problem"


@pytest.mark.parametrize(
    ("architecture", "flags", "modules", "level", "words"),
    [
        ("x86_64", AVX512 | {"avx512_bf16"}, "_C _C_AVX2 _C_AVX512", OK, "x86_64, vLLM's kernels _C"),
        ("x86_64", {"fma", "avx2"}, "_C _C_AVX2", WARNING, "lacks AVX-512: vLLM uses its AVX2 kernels"),
        ("x86_64", {"fma", "avx2"}, "_C", PROBLEM, "kernels _C_AVX2, which are not installed (installed: _C)"),
        ("x86_64", {"sse4_2", "avx"}, "_C _C_AVX2", PROBLEM, "neither AVX-512 nor AVX2"),
        ("aarch64", set(), "_C", OK, "aarch64"),
    ],
)
def test_vllm_needs_kernels_for_the_processor(
    architecture: str, flags: set[str], modules: str, level: str, words: str
) -> None:
    finding = kernels_for(architecture, frozenset(flags), set(modules.split()))
    assert finding.level == level
    assert words in finding.line


@pytest.mark.parametrize(
    ("role", "parallel", "target", "demanded", "there", "level"),
    [
        (LEARNER, 1, "", 1, 0, PROBLEM),
        (LEARNER, 1, "", 0, 0, WARNING),
        (LEARNER, 4, "", 0, 2, PROBLEM),
        (GENERATOR, 2, "", 2, 2, OK),
        (GENERATOR, 1, "", 0, 0, PROBLEM),
        (GENERATOR, 1, "cpu", 0, 0, WARNING),
    ],
)
def test_gpus_are_compared_with_the_demand_and_the_ranks(
    role: Role, parallel: int, target: str, demanded: int, there: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computing, "installed_version", CUDA_BUILDS.get)
    machine = Machine(environ={"LOCAL_WORLD_SIZE": str(parallel), "VLLM_TARGET_DEVICE": target})
    config = config_of(generator={"engine": {"tensor_parallel_size": parallel}})
    finding = compare(Context(role, machine, config), demanded, Gpus(there, "" if there else "none"))
    assert finding.level == level
    assert ("start with compose.gpu.yaml, or leave that out" in finding.line) == (there < demanded)


def test_hidden_gpus_differ_from_absent_ones(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert why_no_gpu("no-library", {}, tmp_path) == "/dev/nvidia0 is there, but libcuda.so.1 is not"
    assert why_no_gpu("100", {"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == "CUDA_VISIBLE_DEVICES = ''"
