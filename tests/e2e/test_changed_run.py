"""A run that its user changes, extends and forks: real vLLM, DeepSpeed and Redis, each start by `spo`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from tests.support.page import Page

pytestmark = pytest.mark.e2e
BATCH = 8
MODULE = """
def ends_in_a_digit(text, answer, row):
    return float(text[-1:].isdigit())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Model, prompts, and run.yaml of a small run whose Redis is the embedded one."""
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path / "model")
    rows = [json.dumps({"prompt": f"train {i}", "answer": str(i % 10)}) for i in range(60)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    settings = {
        "run": {"name": "first", "experiment": "first", "output_dir": "runs", "steps": 2},
        "model": {"path": "model", "dtype": "float32", "max_model_len": 128},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 64},
        "sampler": {"batch_size": BATCH, "max_staleness": 1},
        "generator": {"max_concurrency": 8},
        "learner": {"dtype": "float32", "lr": 1e-4, "checkpoint_every": 2, "token_budget": 2048},
        "episode": {"max_response_tokens": 16, "reward": "mine:ends_in_a_digit", "rollouts_every": 1},
        "broker": {"heartbeat": 0.5, "dead_after": 3.0},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def spo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on meanwhile, with its log as output; ended by its process id if the test fails."""
    command = [sys.executable, "-m", "launcher.cli", "run", *arguments, "--plain", "--generators", "1"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return spo(folder, "run", *arguments, "--plain", "--generators", "1")


def summary(folder: Path, name: str) -> dict[str, Any]:
    text = (folder / "runs" / name / "summary.json").read_text()
    return dict(json.loads(text))


def learning_rates(folder: Path, name: str) -> dict[int, float]:
    """By step, as the learner used them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "runs" / name / "tensorboard" / "learner"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars("actor/lr")}


def test_a_run_is_mended_extended_changed_and_forked(folder: Path) -> None:
    # A start that fails leaves nothing that stands in the way.
    failed = run(folder, "run.yaml")
    assert (failed.returncode, "cannot import mine" in failed.stdout + failed.stderr) == (2, True)
    (folder / "mine.py").write_text(MODULE)
    mended = run(folder, "run.yaml", "-o", "sampler.batch_size=4")
    assert mended.returncode == 0, mended.stdout[-3000:]
    assert summary(folder, "first")["steps"] == 2
    over = run(folder, "run.yaml", "-o", "sampler.batch_size=4")
    assert (over.returncode, "run 'first' is finished; give it more with -o run.steps=N" in over.stderr) == (2, True)

    # From anywhere, by the configuration in the run folder.
    own = str(folder / "runs" / "first" / "config.yaml")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    refused = run(elsewhere, own, "-o", "run.steps=4", "-o", "sampler.batch_size=8")
    assert (refused.returncode, "cannot change after step 2" in refused.stderr) == (2, True)
    with running(elsewhere, own, "-o", "run.steps=4", "-o", "learner.lr=5e-5") as extended:
        assert extended.stdout is not None
        log = [next(line for line in extended.stdout if "progress" in line)]
        twice = run(folder, own)
        assert (twice.returncode, "is in use by process" in twice.stderr) == (2, True)
        log += extended.stdout
        assert extended.wait(timeout=60) == 0, log[-20:]
    figures = summary(folder, "first")
    assert (figures["steps"], figures["counters"]["batched"]) == (4, 4 * 4)
    assert figures["counters"]["dispatched"] == figures["counters"]["counted"]
    assert learning_rates(folder, "first") == pytest.approx({1: 1e-4, 2: 1e-4, 3: 5e-5, 4: 5e-5})
    changes = [json.loads(line) for line in (folder / "runs/first/changes.jsonl").read_text().splitlines()]
    assert [(change["step"], change["key"]) for change in changes] == [(2, "run.steps"), (2, "learner.lr")]

    forked = spo(folder, "fork", "runs/first", "runs/second", "-o", "run.steps=6", "-o", "sampler.batch_size=8")
    assert forked.returncode == 0, forked.stderr
    second = run(folder, "runs/second/config.yaml", "--resume")
    assert second.returncode == 0, second.stdout[-3000:]
    assert learning_rates(folder, "second") == pytest.approx({5: 5e-5, 6: 5e-5})
    assert summary(folder, "second")["counters"]["batched"] == 4 * 4 + 2 * 8
    assert (folder / "runs/first/checkpoints/step_4/checkpoint.json").exists()

    reported = spo(folder, "report", "runs/first", "--png", "pictures")
    assert reported.returncode == 0, reported.stderr
    page = Page((folder / "runs/first/report.html").read_text())
    assert {"reward", "staleness", "throughput", "lengths"} <= set(page.ids)
    for text in ("finished", "nothing held out was evaluated", "5e-05", "spo-trainer", "deepspeed"):
        assert text in page.seen
    assert "does not hold" not in page.seen
    assert (folder / "pictures/reward.png").exists()
    compared = spo(folder, "compare", "runs", "-o", "compared.html")
    assert compared.returncode == 0, compared.stderr
    assert "sampler.batch_size" in compared.stdout
    assert "2 runs compared" in Page((folder / "compared.html").read_text()).seen
