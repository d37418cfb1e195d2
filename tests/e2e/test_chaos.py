"""`spo chaos`: a minute in which everything fails that can, and counts that agree all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.whole_run import cache_of_quickstart, options, started

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STEPS, BATCH = 16, 32


def test_the_counts_agree_whatever_fails(tmp_path: Path) -> None:
    settings = options({"sampler.batch_size": BATCH, "eval.limit": 8})
    what = ("--task", "agent", "--teacher", "--minutes", "1", "--steps", STEPS, "--seed", "2")
    command = ("chaos", *what, "--plain", "--output", tmp_path / "runs")
    with started(tmp_path / "chaos.log", *command, *settings, environment=cache_of_quickstart(tmp_path)) as process:
        code = process.wait(timeout=1500)
    log = (tmp_path / "chaos.log").read_text()
    assert code == 0, log[-4000:]
    result = json.loads((tmp_path / "runs" / "quickstart-agent-1" / "chaos.json").read_text())
    assert not [check for check in result["checks"] if check["problem"]]
    assert result["figures"]["samples trained on"] == STEPS * BATCH
    assert sum(result["faults"].values()) >= 4, log
