"""A model that vLLM quantises as it loads it is updated like any other, and what an update lacks is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("quantised_program.py")
STEP = 1 / 16  # of fp8 with three bits behind the point: half a step is at most 1/16 of the number


def test_a_quantised_model_is_updated_or_what_lacks_is_named(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    measures = json.loads(ran.stdout.splitlines()[-1])
    assert measures["dtype"] == "torch.float8_e4m3fn"
    assert measures["after"] <= STEP < measures["before"]
    complete, *incomplete = measures["errors"].items()
    assert complete == ("None", "")
    for name, error in incomplete:
        assert error == f"the update lacks 1 weights of the model, among them {name}"
