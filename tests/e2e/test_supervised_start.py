"""From a random model to a policy: `spo sft` on demonstrations, then `spo run` from its newest export."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from launcher.quickstart import tiny_model
from launcher.tasks import find_task
from launcher.tasks.task import Problem, write
from tests.support.whole_run import json_lines, spo

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TASK = find_task("arithmetic")
STEPS, ROWS = 100, 64


def row(problem: Problem, rng: random.Random) -> dict[str, Any]:
    """A demonstration as messages; what a task weighs by token is chosen as often as it is demonstrated."""
    messages = [{"role": "user", "content": problem.prompt}]
    for turn in TASK.demonstrate(problem, rng):
        messages.append({"role": "assistant", "content": turn.content})
        if turn.reply is not None:
            messages.append({"role": turn.replied_by, "content": turn.reply})
    return {"messages": messages}


def done(folder: Path, *words: object) -> str:
    ended = spo(*words, folder=folder, timeout=1500)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_a_random_model_learns_from_demonstrations_and_then_from_rewards_until_it_is_no_better(tmp_path: Path) -> None:
    tokenizer = tiny_model.build_tokenizer(TASK.extra_tokens)
    tiny_model.save(tiny_model.build_model(tokenizer, seed=0), tokenizer, tmp_path / "random")
    train, heldout = TASK.split(seed=0)
    write(train, tmp_path / "train.jsonl")
    write(heldout[:64], tmp_path / "heldout.jsonl")
    rng = random.Random(0)
    lines = [json.dumps(row(problem, rng)) + "\n" for problem in train]
    (tmp_path / "demonstrations.jsonl").write_text("".join(lines))
    settings = {
        "run.name": "start", "run.experiment": "start", "run.output_dir": "runs", "eval.every": STEPS // 2,
        "model.path": "random", "data.train": "train.jsonl", "data.heldout": "heldout.jsonl",
        "sft.data": "demonstrations.jsonl", "sft.steps": STEPS, "sft.batch_size": ROWS,
        "sft.learner": "{lr: 3e-3, schedule: cosine, warmup_steps: 20, checkpoint_every: 50}",
    }  # fmt: skip
    overrides = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    evaluated = ("--eval", "--generators", 1, "-o", "eval.before_training=false")
    done(tmp_path, "sft", TASK.template, "--ranks", 1, *evaluated, *overrides)
    entries = json_lines(tmp_path / "runs" / "sft" / "metrics.jsonl")
    metrics = [entry["values"] for entry in entries if entry["process"] == "learner"]
    assert metrics[-1]["sft/loss"] < metrics[0]["sft/loss"] / 3
    accuracy = {one["version"]: one["values"]["validation/accuracy"] for one in entries if one["process"] == "sampler"}
    assert list(accuracy) == [STEPS // 2, STEPS]
    assert accuracy[STEPS] > 0.4
    # A policy that hardly moves ends with the first evaluation that is no better than that of step 0.
    further = {
        "model.path": "runs/sft", "algorithm.demonstrations.data": "demonstrations.jsonl", "learner.lr": 1e-9,
        "run.steps": 40, "run.stop_when": 1, "eval.every": 2,
    }  # fmt: skip
    overrides += [word for key, value in further.items() for word in ("-o", f"{key}={value}")]
    done(tmp_path, "run", TASK.template, "--plain", "--generators", 1, *overrides)
    values = [entry["values"] for entry in json_lines(tmp_path / "runs" / "start" / "metrics.jsonl")]
    (first, *_) = [of_step for of_step in values if "validation/accuracy" in of_step]
    losses = [of_step["sft/loss"] for of_step in values if "sft/loss" in of_step]
    assert 2 <= len(losses) < 40
    assert max(losses) < metrics[0]["sft/loss"] / 3
    # Three in four demonstrations call the calculator.
    assert first["validation/accuracy"] > 0.4
    again = spo("run", TASK.template, "--plain", *overrides, folder=tmp_path)
    assert (again.returncode, "no better for 1 evaluation" in again.stderr) == (2, True)
    assert f"runs/sft/checkpoints/step_{STEPS}/hf" in (tmp_path / "runs" / "start" / "config.yaml").read_text()
