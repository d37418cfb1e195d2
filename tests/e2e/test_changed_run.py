"""A run that its user changes, extends and forks: real vLLM, DeepSpeed and Redis, each start by `spo`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.whole_run import json_lines, options, spo, started, write_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
BATCH = 8
MODULE = """
def ends_in_a_digit(text, answer, row):
    return float(text[-1:].isdigit())
"""
SECTIONS = {
    "run": {"steps": 2, "output_dir": "runs"},
    "sampler": {"batch_size": BATCH, "max_staleness": 1},
    "learner": {"checkpoint_every": 2},
    "episode": {"max_response_tokens": 16, "reward": "mine:ends_in_a_digit", "rollouts_every": 1},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Model, prompts, and first.yaml of a small run whose Redis is the embedded one."""
    write_run(tmp_path, "first", SECTIONS, train=60)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return spo("run", *words, "--plain", "--generators", "1", folder=folder)


def summary(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / "runs" / name / "summary.json").read_text()))


def learning_rates(folder: Path, name: str) -> dict[int, float]:
    """By step, as the learner used them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "runs" / name / "tensorboard" / "learner"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars("actor/lr")}


def test_a_run_is_fixed_extended_changed_and_forked(folder: Path) -> None:
    # A start that fails leaves nothing that stands in the way.
    failed = run(folder, "first.yaml")
    assert (failed.returncode, "cannot import mine" in failed.stdout + failed.stderr) == (2, True)
    (folder / "mine.py").write_text(MODULE)
    fixed = run(folder, "first.yaml", "-o", "sampler.batch_size=4")
    assert fixed.returncode == 0, fixed.stdout[-3000:]
    assert summary(folder, "first")["steps"] == 2
    over = run(folder, "first.yaml", "-o", "sampler.batch_size=4")
    assert (over.returncode, "run 'first' is finished; give it more steps with -o run.steps=N" in over.stderr) == (
        2,
        True,
    )

    # From anywhere, by the configuration in the run folder.
    own = str(folder / "runs" / "first" / "config.yaml")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    refused = run(elsewhere, own, "-o", "run.steps=4", "-o", "sampler.batch_size=8")
    assert (refused.returncode, "cannot change after step 2" in refused.stderr) == (2, True)
    words = ("run", own, "-o", "run.steps=4", "-o", "learner.lr=5e-5", "--plain", "--generators", "1")
    with started(None, *words, folder=elsewhere) as extended:
        assert extended.stdout is not None
        log = [next(line for line in extended.stdout if "progress" in line)]
        twice = run(folder, own)
        assert (twice.returncode, "is in use by process" in twice.stderr) == (2, True)
        log += extended.stdout
        assert extended.wait(timeout=600) == 0, log[-20:]
    figures = summary(folder, "first")
    assert (figures["steps"], figures["counters"]["batched"]) == (4, 4 * 4)
    assert figures["counters"]["dispatched"] == figures["counters"]["counted"]
    assert learning_rates(folder, "first") == pytest.approx({1: 1e-4, 2: 1e-4, 3: 5e-5, 4: 5e-5})
    changes = json_lines(folder / "runs/first/changes.jsonl")
    assert [(change["step"], change["key"]) for change in changes] == [(2, "run.steps"), (2, "learner.lr")]

    forked = spo(
        "fork", "runs/first", "runs/second", *options({"run.steps": 6, "sampler.batch_size": 8}), folder=folder
    )
    assert forked.returncode == 0, forked.stderr
    second = run(folder, "runs/second/config.yaml", "--resume")
    assert second.returncode == 0, second.stdout[-3000:]
    assert learning_rates(folder, "second") == pytest.approx({5: 5e-5, 6: 5e-5})
    assert summary(folder, "second")["counters"]["batched"] == 4 * 4 + 2 * 8
    assert (folder / "runs/first/checkpoints/step_4/checkpoint.json").exists()

    reported = spo("report", "runs/first", "-o", "report.html", folder=folder)
    assert reported.returncode == 0, reported.stderr
    compared = spo("compare", "runs", "-o", "compared.html", folder=folder)
    assert (compared.returncode, "sampler.batch_size" in compared.stdout) == (0, True), compared.stderr
    for file in ("report.html", "compared.html"):
        assert "sampler.batch_size" in (folder / file).read_text()
