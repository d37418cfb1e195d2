"""`spo chaos`: two minutes in which everything fails that can, and books that balance all the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.quickstart.cache import key
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from launcher.tasks import DEFAULT

pytestmark = pytest.mark.e2e
STEPS, BATCH = 60, 32


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, with a model that has learned nothing; ended by its process id if the test fails."""
    tokenizer = build_tokenizer(DEFAULT.extra_tokens)
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path / "cache" / "spo" / f"warm-start-{key(DEFAULT)}")
    command = [sys.executable, "-m", "launcher.cli", "chaos", "--minutes", "2", "--steps", str(STEPS), "--seed", "2"]
    command += [
        "--plain",
        "--output",
        str(tmp_path / "runs"),
        "-o",
        f"sampler.batch_size={BATCH}",
        "-o",
        "eval.limit=8",
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with (tmp_path / "chaos.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment)
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def test_the_books_balance_whatever_fails(chaos: subprocess.Popen[str], tmp_path: Path) -> None:
    code = chaos.wait(timeout=500)
    log = (tmp_path / "chaos.log").read_text()
    assert code == 0, log[-4000:]
    result = json.loads((tmp_path / "runs" / "quickstart-1" / "chaos.json").read_text())
    assert not [check for check in result["checks"] if check["problem"]]
    assert result["books"]["samples trained on"] == STEPS * BATCH
    assert sum(result["faults"].values()) >= 8, log
