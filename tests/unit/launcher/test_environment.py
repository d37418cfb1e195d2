"""The lock: what a text-only project does not need is absent, and what it needs is pinned."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec", "triton"])
def test_what_breaks_a_cpu_build_of_torch_is_not_installed_by_us(name: str) -> None:
    assert name not in locked()


def test_every_direct_dependency_is_pinned_at_a_version_that_is_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    cpu = [name for name in extras if name not in ("generator", "learner", "liger", "gpu")]
    wanted = [*project["dependencies"], *(text for name in cpu for text in extras[name])]
    pins = locked()
    for requirement in map(Requirement, wanted):
        if requirement.name != project["name"]:
            pin = pins[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(pin), f"{requirement} but the lock has {pin}"


def test_the_lock_names_versions_only() -> None:
    for name, version in locked().items():
        assert re.fullmatch(r"[0-9][0-9a-z.+]*", version), f"{name}=={version}"
