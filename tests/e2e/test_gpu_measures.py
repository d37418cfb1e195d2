"""The tests of `make test-gpu` on the CPU and tiny models, so that none of our errors costs time on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gpu_measures import Figures

PARTS = ["learner tokens/s", "MFU", "first copy", "publish", "engine tokens/s", "bare AsyncLLM tokens/s"]
PARTS += ["Qwen3.5: gap after", "GPU 0: seconds"]
# tests/e2e/test_families.py compares engine and learner at greater length.
ELSEWHERE = "not (Qwen3-MoE or the_engines_logprobs_are_the_learners)"
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_what_is_measured_on_a_gpu_can_be_measured_on_a_cpu(tmp_path: Path) -> None:
    figures = Figures(tmp_path / "figures.jsonl")
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--on-cpu", "--figures", figures.path, "-n", "0", "-q"]
    command += ["-k", ELSEWHERE]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert ran.returncode == 0, ran.stdout[-5000:]
    names = " ".join(figures.read())
    for part in PARTS:
        assert part in names
