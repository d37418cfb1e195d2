"""Supervised training that Python starts: in ranks of its own, continued on more of them, and done only once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

import spo
from common.process import SIGNALS
from tests.support.engine import save_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "model", seed=0)
    rows = [{"prompt": f"What is {n} + 1?", "completion": str(n + 1)} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, Any] = {
        "model": {"path": str(tmp_path / "model"), "dtype": "float32", "max_model_len": 64},
        "data": {"train": "none.jsonl", "max_prompt_tokens": 32},
        "run": {"output_dir": str(tmp_path / "runs"), "log_to": []},
        "learner": {"dtype": "float32", "zero_stage": 2},
        "sft": {"data": str(tmp_path / "rows.jsonl"), "batch_size": 4, "steps": 2},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(sections))
    return tmp_path / "sft.yaml"


def test_training_continues_on_more_ranks_ends_once_and_leaves_no_trace_in_the_process(config: Path) -> None:
    folder = config.parent / "runs" / "sft"
    before = dict(os.environ), [signal.getsignal(number) for number in SIGNALS]
    assert spo.sft(config, ranks=1) == folder / "checkpoints" / "step_2"
    for _ in range(2):  # the second time there is nothing left to do
        assert spo.sft(config, {"sft.steps": 3}, ranks=2) == folder / "checkpoints" / "step_3"
    assert (dict(os.environ), [signal.getsignal(number) for number in SIGNALS]) == before
    metrics = spo.load(folder).metrics()
    assert metrics["step"] == [1, 2, 3]
    assert all(loss > 0 for loss in metrics["sft/loss"])
