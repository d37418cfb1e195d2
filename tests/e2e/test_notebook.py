"""The notebook in examples/ runs as it is, on real vLLM, DeepSpeed and Redis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.whole_run import write_run

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


def test_the_notebook_runs(tmp_path: Path) -> None:
    sections = {"sampler": {"batch_size": 8}, "episode": {"max_response_tokens": 16}, "eval": {"every": 4}}
    config = write_run(tmp_path, "run", sections, heldout=4)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/arithmetic").symlink_to(config.parent)
    command = [sys.executable, "-m", "tests.support.notebook", str(ROOT / "examples/notebook.ipynb")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    doctor, started, steps, ended, evaluations, metrics, wrong, exported, figure = json.loads(ran.stdout)
    assert doctor == "[]"
    assert "running, step 0" in started  # its configuration may not be written yet
    assert [line.split()[0] for line in steps.splitlines()] == ["1", "2", "3", "4"]
    assert ended.count("<polyline") == 2
    assert "finished, step 4 of 4" in ended
    assert [table.count("<tr") for table in (evaluations, metrics)] == [3, 7]  # with heads of one and two rows
    assert "<td>0.0</td>" in wrong
    assert exported == "4"
    assert (tmp_path / "trained/config.json").exists()
    assert 0 <= float(figure) <= 1
