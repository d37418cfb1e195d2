"""`learner.weights.backend: nccl`, where it cannot be: one line that names the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.config import parse_config
from common.errors import UserError


def tree(**weights: Any) -> dict[str, Any]:
    return {"model": {"path": "m"}, "data": {"train": "t"}, "learner": {"weights": {"backend": "nccl", **weights}}}


def test_it_is_a_name_and_the_same_for_the_whole_run() -> None:
    assert parse_config(tree()).learner.weights.backend == "nccl"
    with pytest.raises(UserError, match="learner.weights.backend = 'ipc'.*'zmq' or 'nccl'"):
        parse_config(tree(backend="ipc"))


def test_a_relay_of_ones_own_choice_is_refused_with_it() -> None:
    with pytest.raises(UserError, match="set the backend to zmq, or relay=direct"):
        parse_config(tree(relay="tcp://node-1:5556"))


@pytest.mark.integration
def test_a_relay_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: m}\ndata: {train: t}\nlearner: {weights: {backend: nccl}}\n")
    command = [sys.executable, "-m", "relay.cli", "-c", "run.yaml"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: a relay passes on what generators pull")
    assert ran.stderr.count("\n") == 1
