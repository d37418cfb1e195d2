"""The code quickstart in small: programs that a model writes run in the real sandbox of a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.quickstart.cache import cached_model
from launcher.quickstart.inputs import write_inputs
from launcher.tasks import TASKS
from launcher.tasks.task import Recipe
from tests.conftest import RedisServer

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("bubblewrap")]
ROOT = Path(__file__).parents[2]
STEPS, BATCH, HELDOUT = 2, 16, 16


def test_programs_of_the_model_run_in_the_sandbox_and_every_task_counts_once(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    # Enough to write programs, few of which are right.
    task = replace(TASKS["code"], recipe=Recipe(steps=60, rows=32, warmup=5))
    write_inputs(tmp_path / "inputs", cached_model(task, cache=tmp_path / "cache"), seed=0, task=task)
    settings = {
        "run.name": "code",
        "run.experiment": "code",
        "run.output_dir": tmp_path / "runs",
        "run.steps": STEPS,
        "model.path": tmp_path / "inputs" / "model",
        "data.train": tmp_path / "inputs" / "train.jsonl",
        "data.heldout": tmp_path / "inputs" / "heldout.jsonl",
        "sampler.batch_size": BATCH,
        "eval.every": 0,
        "eval.limit": HELDOUT,
        "episode.rollouts_every": 1,
    }
    overrides = [text for key, value in settings.items() for text in ("-o", f"{key}={value}")]
    command = [sys.executable, "-m", "launcher.cli", "run", str(ROOT / "configs" / "code.yaml"), "--plain"]
    command += ["--generators", "1", "--redis", own_redis.url, *overrides]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr[-3000:]

    folder = tmp_path / "runs" / "code"
    counters = json.loads((folder / "summary.json").read_text())["counters"]
    assert counters["dispatched"] == counters["counted"] == STEPS * BATCH + 2 * HELDOUT
    assert counters.get("set_aside", 0) == 0
    files = [*folder.glob("rollouts/*.jsonl"), *folder.glob("validation_data/*.jsonl")]
    episodes = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert len(episodes) == counters["counted"]
    for episode in episodes:
        last = episode["messages"][-1]
        right = last["role"] == "assistant" and last["content"].strip() == episode["gts"]
        assert episode["reward"] == float(right)
    programs = [message for episode in episodes for message in episode["messages"] if message["role"] == "tool"]
    assert sum(episode["tool_calls"] for episode in episodes) == len(programs) > HELDOUT
    assert all(message["name"] in ("code_interpreter", "") for message in programs)
